"""What the sampler keeps per slot: compiled bias and bans, and counts of tokens for the penalties."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.sampling.rules import outside
from scheduler.plan import SamplingParams, ScheduledRow

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of one request, prompt and output, each with how often it was generated."""

    def __init__(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        seen = dict.fromkeys(prompt, 0)
        for token_id in generated:
            seen[token_id] = seen.get(token_id, 0) + 1
        self._index = {token_id: idx for idx, token_id in enumerate(seen)}
        capacity = max(64, 2 * len(seen))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: len(seen)] = list(seen)
        self._counts[: len(seen)] = list(seen.values())
        self.num_generated = len(generated)

    @property
    def ids(self) -> I64:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> F32:
        return self._counts[: len(self._index)]

    def add(self, token_id: int) -> None:
        idx = self._index.setdefault(token_id, len(self._index))
        if idx == len(self._ids):
            self._ids = np.resize(self._ids, 2 * idx)
            self._counts = np.concatenate([self._counts, np.zeros(idx, dtype=np.float32)])
        self._ids[idx] = token_id
        self._counts[idx] += 1
        self.num_generated += 1


class Slot:
    """Made for a request's first row that needs one; lives until the slot is released."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.sampling = sampling
        bias = dict(sampling.logit_bias)
        self.bias_ids = np.array(list(bias), dtype=np.int64)
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self.banned_ids = np.array(
            [token_id for token_id in sampling.banned_token_ids if 0 <= token_id < vocab_size], dtype=np.int64
        )
        self.counts: TokenCounts | None = None
        self.error = outside("logit_bias", bias, vocab_size)

    def load_history(self, history: tuple[tuple[int, ...], tuple[int, ...]], vocab_size: int) -> None:
        prompt, generated = history
        self.error = self.error or outside("history", (*prompt, *generated), vocab_size)
        self.counts = None if self.error else TokenCounts(prompt, generated)

    def catch_up(self, row: ScheduledRow) -> None:
        """Count the token that the previous step sampled and this row has; only once, even if a step is repeated."""
        if self.counts is not None and self.counts.num_generated < row.num_generated_tokens:
            self.counts.add(row.token_ids[-1])


def adjust(logits: F32, slots: Sequence[tuple[int, Slot]], banning: Sequence[bool]) -> None:
    """Apply logit bias, then repetition, frequency and presence penalties (vLLM's order), then bans.

    `logits` [num_rows, vocab_size]; slots are given with their row, and `banning` says whether their bans apply now.
    """
    biased = [(row, slot) for row, slot in slots if slot.bias_ids.size]
    if biased:
        at = _positions([row for row, _ in biased], [slot.bias_ids for _, slot in biased])
        logits[at] += np.concatenate([slot.bias for _, slot in biased])
    counted = [(row, slot.sampling, slot.counts) for row, slot in slots if slot.counts is not None]
    if counted:
        _penalize(logits, counted)
    banned = [(row, slot.banned_ids) for (row, slot), holds in zip(slots, banning, strict=True) if holds]
    if banned:
        logits[_positions([row for row, _ in banned], [ids for _, ids in banned])] = -np.inf


def _penalize(logits: F32, counted: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """The repetition penalty counts prompt and output, the others only the output, as in OpenAI and vLLM."""
    rows, sampling, counts = zip(*counted, strict=True)
    lengths = [len(count.ids) for count in counts]
    repetition, frequency, presence = (
        np.repeat(np.array(values, dtype=np.float32), lengths)
        for values in (
            [params.repetition_penalty for params in sampling],
            [params.frequency_penalty for params in sampling],
            [params.presence_penalty for params in sampling],
        )
    )
    generated = np.concatenate([count.counts for count in counts])
    at = _positions(rows, [count.ids for count in counts])
    values = logits[at]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= frequency * generated + presence * (generated > 0)
    logits[at] = values


def _positions(rows: Sequence[int], ids: Sequence[I64]) -> tuple[I64, I64]:
    """Row and column index of every (row, id) pair."""
    return np.repeat(np.array(rows, dtype=np.int64), [len(row_ids) for row_ids in ids]), np.concatenate(ids)
