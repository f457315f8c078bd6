"""Splitting loses nothing; a parent's inputs are all its children's outputs; the reduction always ends."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import JobError
from service.pipelines.map_reduce import (
    MAX_LEVELS,
    SEPARATOR,
    Budget,
    Node,
    Summary,
    group_outputs,
    summarize_text,
)
from service.pipelines.text_split import split_text

TEXT = st.text(st.sampled_from("ab .\n!é漢"), max_size=400)


def count_words(text: str) -> int:
    return len(text.split())


def count_bytes(text: str) -> int:
    return len(text.encode())


def count_merging(text: str) -> int:
    """Joined text may take more tokens than its parts: 'ab' takes more tokens across a cut than alone."""
    return len(text) + 3 * text.count("ab")


@given(text=TEXT, limit=st.integers(4, 60), count=st.sampled_from([count_words, count_bytes, count_merging]))
def test_pieces_cover_the_text_and_keep_the_limit(text: str, limit: int, count) -> None:  # type: ignore[no-untyped-def]
    pieces = split_text(text, limit, count)
    assert "".join(pieces) == text
    assert all(piece for piece in pieces)
    assert all(count(piece) <= limit or len(piece) == 1 for piece in pieces)


def test_cuts_fall_on_the_best_boundary() -> None:
    text = "One two three.\n\nFour five. Six seven eight."
    assert split_text(text, 5, count_words) == ["One two three.\n\n", "Four five. Six seven eight."]
    assert split_text(text, 3, count_words) == ["One two three.\n\n", "Four five. ", "Six seven eight."]
    assert split_text(text, 2, count_words)[:2] == ["One two ", "three.\n\n"]


def test_pieces_are_not_needlessly_small() -> None:
    text = " ".join(f"word{i}." for i in range(1_000))
    assert len(split_text(text, 100, count_words)) == 10


@given(
    outputs=st.lists(st.text("ab .!é漢", max_size=200), min_size=1, max_size=12), limit=st.integers(8, 120)
)
def test_parents_inputs_are_all_their_childrens_outputs(outputs: list[str], limit: int) -> None:
    groups = group_outputs(outputs, limit, count_bytes)
    covered = [child for children, _ in groups for child in children]
    assert sorted(set(covered)) == list(range(len(outputs)))
    assert covered == sorted(covered)
    assert "".join(text.replace(SEPARATOR, "") for _, text in groups) == "".join(outputs)
    assert all(count_bytes(text) <= limit for _, text in groups)


def _summarize(text: str, budget: Budget, reply, nodes: list[Node] | None = None) -> Summary:  # type: ignore[no-untyped-def]
    async def generate(node: Node) -> str:
        if nodes is not None:
            nodes.append(node)
        await asyncio.sleep(0)
        return str(reply(node))

    return asyncio.run(summarize_text(text, budget, count_bytes, generate))


@settings(deadline=None)
@given(
    text=TEXT.filter(str.strip),
    context=st.integers(80, 200),
    output=st.integers(8, 30),
    share=st.floats(0, 1),
)
def test_reduction_ends_for_outputs_of_any_allowed_length(
    text: str, context: int, output: int, share: float
) -> None:
    budget = Budget(context, template_tokens=10, output_tokens=output)
    seen: list[Node] = []
    summary = _summarize(text * 5, budget, lambda node: "x" * round(share * node.output_tokens), seen)
    assert len(summary.levels) <= 2 + math.ceil(math.log2(len(summary.levels[0]) + 1))
    assert "".join(node.text for node in summary.levels[0]) == text * 5
    for node in seen:
        assert count_bytes(node.text) + budget.template_tokens + node.output_tokens <= budget.context_tokens
    assert [node for level in summary.levels for node in level] == seen


def test_reduce_never_ends_when_summaries_do_not_shrink() -> None:
    """An engine that ignores its limit and echoes: the level cap ends the run with an error, not a hang."""
    with pytest.raises(JobError, match=f"after {MAX_LEVELS} levels"):
        _summarize("word " * 200, Budget(100, 10, 20), lambda node: node.text)


def test_levels_above_are_asked_for_less_when_a_level_did_not_shrink() -> None:
    budget = Budget(110, 10, 40)
    summary = _summarize(
        "word " * 100, budget, lambda node: node.text[: node.output_tokens if node.level else 99]
    )
    assert [level[0].output_tokens for level in summary.levels] == [26, 20, 20, 20, 20, 40]


def test_chunk_leaves_room_for_prompt_and_output() -> None:
    budget = Budget(context_tokens=2_048, template_tokens=60, output_tokens=188)
    assert budget.input_tokens == 1_800
    with pytest.raises(JobError, match="leaves 20 for text; the limit is 32"):
        Budget(context_tokens=100, template_tokens=50, output_tokens=30)


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_empty_document_is_an_error_not_an_invention(text: str) -> None:
    with pytest.raises(JobError, match="empty"):
        _summarize(text, Budget(100, 10, 20), lambda node: "made up")


def test_the_first_failure_ends_the_other_nodes_and_is_raised_unchanged() -> None:
    ended = []

    async def generate(node: Node) -> str:
        if node.index == 1:
            raise JobError("failed", "the second one")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(node.index)
        raise AssertionError

    with pytest.raises(JobError, match="the second one"):
        asyncio.run(summarize_text("word " * 50, Budget(100, 10, 20), count_bytes, generate))
    assert sorted(ended) == [0, 2, 3]
