"""Summarizes text of any length within a limited context: first its pieces, then the summaries."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from service.errors import JobError
from service.pipelines.text_split import CountTokens, split_text

SHRINK = 0.75
"""A level's text must be at most this share of the level before, or the next level asks for less."""
MAX_LEVELS = 12
MIN_OUTPUT_TOKENS = 8
MIN_INPUT_TOKENS = 4 * MIN_OUTPUT_TOKENS
SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Budget:
    """Divides the context: what template and output leave is input. Raises JobError when too little is left."""

    context_tokens: int
    template_tokens: int
    output_tokens: int
    piece_tokens: int | None = None
    """Upper bound for one piece; None allows as much as fits."""

    def __post_init__(self) -> None:
        if self.input_tokens < MIN_INPUT_TOKENS:
            raise JobError(
                "context_too_small",
                f"context of {self.context_tokens} tokens - template {self.template_tokens} - output "
                f"{self.output_tokens} leaves {self.input_tokens} for text; the limit is {MIN_INPUT_TOKENS}",
                field="context_tokens", value=self.context_tokens, limit=MIN_INPUT_TOKENS,
            )  # fmt: skip

    @property
    def input_tokens(self) -> int:
        room = self.context_tokens - self.template_tokens - self.output_tokens
        return room if self.piece_tokens is None else min(room, self.piece_tokens)


@dataclass(frozen=True, slots=True)
class Node:
    """One prompt: a piece of the document (level 0), or joined outputs of the level below."""

    level: int
    index: int
    children: tuple[int, ...]
    """Indices in the level below; empty at level 0."""
    text: str
    output_tokens: int
    final: bool


Generate = Callable[[Node], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Summary:
    text: str
    levels: tuple[tuple[Node, ...], ...]

    @property
    def num_nodes(self) -> int:
        return sum(len(level) for level in self.levels)


async def summarize_text(text: str, budget: Budget, count_tokens: CountTokens, generate: Generate) -> Summary:
    """Run all nodes of a level together, level by level, until one is left.

    Raises JobError for text without content, and when more than one node is left after MAX_LEVELS levels.
    """
    if not text.strip():
        raise JobError("empty_document", "the document is empty", field="text", value=len(text), limit=1)
    pieces = await asyncio.to_thread(split_text, text, budget.input_tokens, count_tokens)
    output_tokens = budget.output_tokens
    levels: list[tuple[Node, ...]] = []
    nodes = _nodes(0, [((), piece) for piece in pieces], _share(budget, output_tokens, len(pieces)))
    size = count_tokens(text)
    while len(levels) < MAX_LEVELS:
        levels.append(nodes)
        outputs = await _all_of(nodes, generate)
        if len(nodes) == 1:
            return Summary(outputs[0].strip(), tuple(levels))
        before, size = size, sum(map(count_tokens, outputs))
        if size > SHRINK * before:
            output_tokens = max(MIN_OUTPUT_TOKENS, output_tokens // 2)
        groups = group_outputs(outputs, budget.input_tokens, count_tokens)
        nodes = _nodes(len(levels), groups, _share(budget, output_tokens, len(groups)))
    raise JobError(
        "no_convergence", f"{len(nodes)} summaries were left after {MAX_LEVELS} levels; the limit is 1",
        field="levels", value=len(nodes), limit=MAX_LEVELS,
    )  # fmt: skip


async def _all_of(nodes: Sequence[Node], generate: Generate) -> list[str]:
    """Return the outputs in the nodes' order. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(node, generate)) for node in nodes]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _one(node: Node, generate: Generate) -> str:
    return await generate(node)


def group_outputs(
    outputs: Sequence[str], limit: int, count_tokens: CountTokens
) -> list[tuple[tuple[int, ...], str]]:
    """Join neighbours while they fit: (children, text). Keeps every output, in order.

    An output that is too long by itself is cut into several nodes with the same child.
    """
    groups: list[tuple[tuple[int, ...], str]] = []
    children: list[int] = []
    joined = ""
    for index, output in enumerate(outputs):
        longer = joined + SEPARATOR + output if children else output
        if count_tokens(longer) <= limit:
            children, joined = [*children, index], longer
            continue
        if children:
            groups.append((tuple(children), joined))
        *whole, joined = split_text(output, limit, count_tokens) or [""]
        groups += [((index,), piece) for piece in whole]
        children = [index]
    return [*groups, (tuple(children), joined)]


def _nodes(level: int, groups: list[tuple[tuple[int, ...], str]], output_tokens: int) -> tuple[Node, ...]:
    final = len(groups) == 1
    return tuple(
        Node(level, index, children, text, output_tokens, final)
        for index, (children, text) in enumerate(groups)
    )


def _share(budget: Budget, output_tokens: int, num_nodes: int) -> int:
    """Return a level's output limit: two outputs must fit into one node of the next level, if there is one."""
    if num_nodes == 1:
        return budget.output_tokens
    return max(MIN_OUTPUT_TOKENS, min(output_tokens, budget.input_tokens // 2 - MIN_OUTPUT_TOKENS // 2))
