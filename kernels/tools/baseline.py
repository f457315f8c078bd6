"""How fast transformers serves the same requests: one at a time, in static batches, and batched continuously.

`run_baselines_apart` measures in a separate process, free of our own threads and memory.
"""

import inspect
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from transformers import GenerationConfig

from kernels.models.transformers.quiet import quiet_transformers
from kernels.tools.baseline_model import load_baseline_model
from kernels.weights.source import ModelSource

STATIC_BATCH = 16
NAMES = ("transformers_naive", f"transformers_static_{STATIC_BATCH}", "transformers_continuous")
_PAGE_TOKENS = 256
_SPARE_PAGES = 1.25
"""transformers admits no new requests below a share of free pages; with these spare pages that never happens."""
_SILENCE_S = 600.0
"""Continuous batching counts as stuck after this time without a result."""

Request = tuple[Sequence[int], int]
"""Prompt token ids, and how many tokens to generate."""


@dataclass(frozen=True, slots=True)
class BaselineOptions:
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["auto", "cpu", "cuda"]
    num_threads: int | None
    """None: torch's choice."""
    naive_limit: int
    """Requests generated one at a time; all of them would take longest of all."""
    max_concurrent: int
    """Concurrent requests for which continuous batching gets pages."""
    cpu_batch_tokens: int
    """Tokens per step of continuous batching on a CPU. transformers' default, 8,192, costs a third of its rate there,
    because its attention mask spans the whole batch. On a GPU the default is used."""


@dataclass(frozen=True, slots=True)
class BaselineRun:
    output_tokens_per_s: float
    """Counts the requested tokens; what a static batch computes beyond them is waste."""
    total_s: float
    requests: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class BaselineFailure:
    """transformers failed, and its error."""

    error: str


Outcome = BaselineRun | BaselineFailure
_Generate = Callable[[Sequence[Request]], None]
_Way = Callable[[], AbstractContextManager[_Generate]]


def run_baselines(
    source: ModelSource, requests: Sequence[Request], options: BaselineOptions
) -> Iterator[tuple[str, Outcome | None]]:
    """Yield each of NAMES with None when it begins, then with its outcome. Greedy; ends of sequence are ignored.

    A failure of one way is reported and does not affect the others.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    use_gpu = options.device != "cpu" and torch.cuda.is_available()
    with quiet_transformers(logging.CRITICAL):  # standard error is for our own lines
        try:
            model = load_baseline_model(
                source, getattr(torch, options.dtype), torch.device("cuda" if use_gpu else "cpu")
            )
        except Exception as error:
            yield from dict.fromkeys(NAMES, _failure(error)).items()
            return
        ways: tuple[tuple[_Way, Sequence[Request]], ...] = (
            (lambda: nullcontext(partial(_naive, model)), requests[: options.naive_limit]),
            (lambda: nullcontext(partial(_static, model)), requests),
            (lambda: _continuous(model, requests, options), requests),
        )
        for name, (way, some) in zip(NAMES, ways, strict=True):
            yield name, None
            yield name, _measure(way, some)


def _measure(way: _Way, requests: Sequence[Request]) -> Outcome:
    try:
        with torch.inference_mode(), way() as generate:
            generate([(requests[0][0][:8], 2)])  # The first calls allocate and choose kernels.
            started_s = time.perf_counter()
            generate(requests)
            total_s = time.perf_counter() - started_s
    except Exception as error:
        return _failure(error)
    num_tokens = sum(max_tokens for _, max_tokens in requests)
    return BaselineRun(round(num_tokens / total_s, 3), round(total_s, 3), len(requests), num_tokens)


def _failure(error: Exception) -> BaselineFailure:
    return BaselineFailure(f"{type(error).__name__}: {error}"[:1000])


def _naive(model: Any, requests: Sequence[Request]) -> None:
    for request in requests:
        _generate(model, [request])


def _static(model: Any, requests: Sequence[Request]) -> None:
    for first in range(0, len(requests), STATIC_BATCH):
        _generate(model, requests[first : first + STATIC_BATCH])


def _generate(model: Any, batch: Sequence[Request]) -> None:
    """Generate one batch, prompts padded on the left, until its longest output is complete."""
    width = max(len(prompt) for prompt, _ in batch)
    longest = max(max_tokens for _, max_tokens in batch)
    token_ids = torch.zeros((len(batch), width), dtype=torch.int64)
    mask = torch.zeros_like(token_ids)
    for row, (prompt, _) in enumerate(batch):
        token_ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    output = model.generate(
        token_ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=longest,
        do_sample=False,
        pad_token_id=0,
    ).cpu()  # This waits for the GPU.
    if output.shape[1] != width + longest:
        raise RuntimeError(f"generate gave {output.shape[1] - width} tokens; {longest} were asked for")


@contextmanager
def _continuous(model: Any, requests: Sequence[Request], options: BaselineOptions) -> Iterator[_Generate]:
    """Start a manager with pages for these requests; starting and stopping it is not timed."""
    # Imported here, so that a transformers without it can still run the other two.
    from transformers import ContinuousBatchingConfig

    pages = sorted(
        (-(-(len(prompt) + max_tokens) // _PAGE_TOKENS) + 1 for prompt, max_tokens in requests), reverse=True
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),  # type: ignore[no-untyped-call]
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=int(sum(pages[: options.max_concurrent]) * _SPARE_PAGES) + 1,
            max_batch_tokens=options.cpu_batch_tokens if model.device.type == "cpu" else None,
        ),
    )
    manager.start()
    try:
        yield partial(_add_and_collect, manager)
    finally:
        hard = {"hard_stop": True} if "hard_stop" in inspect.signature(manager.stop).parameters else {}
        manager.stop(block=True, **hard)


def _add_and_collect(manager: Any, requests: Sequence[Request]) -> None:
    """Submit all requests at once. Raises RuntimeError if an output fails, lacks tokens or does not arrive."""
    waiting = {}
    for prompt, max_tokens in requests:
        waiting[manager.add_request(list(prompt), max_new_tokens=max_tokens)] = max_tokens
    heard_s = time.monotonic()
    while waiting:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running() or time.monotonic() - heard_s > _SILENCE_S:
                raise RuntimeError(f"continuous batching ended with {len(waiting)} requests open")
            continue
        heard_s = time.monotonic()
        if not result.is_finished():
            continue
        if result.error is not None:
            raise RuntimeError(f"continuous batching: {result.error}")
        wanted = waiting.pop(result.request_id)
        if len(result.generated_tokens) != wanted:
            raise RuntimeError(
                f"continuous batching gave {len(result.generated_tokens)} tokens; {wanted} were asked for"
            )


def run_baselines_apart(
    source: ModelSource,
    requests: Sequence[Request],
    options: BaselineOptions,
    on_start: Callable[[str], None] = lambda _name: None,
) -> dict[str, Outcome]:
    """Outcomes by name; takes minutes. If the process dies, what it has not measured counts as failed."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_measure_apart, args=(sender, source, requests, options), name="baseline"
    )
    process.start()
    sender.close()
    outcomes: dict[str, Outcome] = {}
    try:
        while len(outcomes) < len(NAMES):
            name, outcome = receiver.recv()
            if outcome is None:
                on_start(name)
            else:
                outcomes[name] = outcome
    except EOFError:
        process.join()
        lost = BaselineFailure(f"its process ended with exit code {process.exitcode}")
        outcomes |= {name: lost for name in NAMES if name not in outcomes}
    finally:
        receiver.close()
        process.kill()
        process.join()
    return outcomes


def _measure_apart(
    sender: Connection, source: ModelSource, requests: Sequence[Request], options: BaselineOptions
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C and kills this process.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for item in run_baselines(source, requests, options):
        sender.send(item)


def _end_with_parent() -> None:
    """End this process when the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
