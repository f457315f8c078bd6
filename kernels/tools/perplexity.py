"""How well a loaded model predicts given tokens: their log-probabilities, from the forward pass that serves.

A plan samples one token per row, but here every position's logits are needed. So the model is called directly, a few
tokens at a time: memory is bounded by CHUNK_TOKENS rows of logits, whatever the window's length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kernels.errors import OptionsError
from kernels.runtime.batch_buffers import BatchBuffers
from kernels.runtime.model_runner import ModelRunner
from scheduler.plan import ScheduledRow, StepPlan

CHUNK_TOKENS = 64
"""Tokens per forward pass. With a vocabulary of 262,144 their logits take 67 MB, and twice that while they are
normalized."""


def score_windows(
    runner: ModelRunner,
    windows: Sequence[Sequence[int]],
    *,
    num_given: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[float]:
    """Yield each window's sum of negative natural-log probabilities of its tokens from `num_given` on.

    Each token is predicted from all of its window before it, and from nothing else. Runs on the caller's
    thread in the first blocks of the pool, so no step may run meanwhile. Raises OptionsError for a window beyond the
    runner's length.
    """
    assert num_given >= 1, "the first token of a window has nothing to be predicted from"
    scorer = _Scorer(runner, chunk_tokens)
    longest = max(map(len, windows), default=0)
    if longest - 1 > runner.max_model_len:
        raise OptionsError(
            f"a window has {longest} tokens; model and KV pool take {runner.max_model_len + 1}"
        )
    for window in windows:
        yield scorer.score(window, num_given)


class _Scorer:
    def __init__(self, runner: ModelRunner, chunk_tokens: int) -> None:
        self._model = runner.model
        self._block_size = runner.block_size
        self._chunk_tokens = chunk_tokens
        self._buffers = BatchBuffers(
            max_num_rows=1,
            max_num_tokens=chunk_tokens,
            max_num_blocks=-(-runner.max_model_len // runner.block_size),
            block_size=runner.block_size,
        )

    @torch.inference_mode()
    def score(self, window: Sequence[int], num_given: int) -> float:
        total = 0.0
        num_inputs = len(window) - 1
        for first in range(0, num_inputs, self._chunk_tokens):
            end = min(first + self._chunk_tokens, num_inputs)
            logits = self._logits(window, first, end)
            expected = torch.tensor(window[first + 1 : end + 1], device=logits.device)
            losses = torch.nn.functional.cross_entropy(logits, expected, reduction="none")
            total += float(losses[max(0, num_given - 1 - first) :].double().sum())
        return total

    def _logits(self, window: Sequence[int], first: int, end: int) -> torch.Tensor:
        """[end - first, vocab_size]: logits of the tokens from `first` on, whose K/V is written."""
        blocks = tuple(range(-(-end // self._block_size)))
        row = ScheduledRow("window", 0, tuple(window[first:end]), first, blocks, None, 0)
        batch = self._buffers.fill(StepPlan(0, (row,)))
        return self._model.forward(replace(batch, sample_indices=torch.arange(end - first)))
