"""What the sampler keeps per seat: compiled bias and bans, and counts of tokens for the penalties."""

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


class Seat:
    """Built in a request's first row that needs one; lives until the seat is released."""

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
        """Count the token that the step before sampled, which this row brings along; once, though a step may run
        again."""
        if self.counts is not None and self.counts.num_generated < row.num_generated_tokens:
            self.counts.add(row.token_ids[-1])


def adjust(logits: F32, seats: Sequence[tuple[int, Seat]], banning: Sequence[bool]) -> None:
    """Applies logit bias, then repetition, frequency and presence penalties (vLLM's order), then bans.

    `logits` [num_rows, vocab_size]; each seat comes with its row and with whether its bans hold in this step.
    """
    biased = [(row, seat) for row, seat in seats if seat.bias_ids.size]
    if biased:
        at = _positions([row for row, _ in biased], [seat.bias_ids for _, seat in biased])
        logits[at] += np.concatenate([seat.bias for _, seat in biased])
    counted = [(row, seat.sampling, seat.counts) for row, seat in seats if seat.counts is not None]
    if counted:
        _penalize(logits, counted)
    banned = [(row, seat.banned_ids) for (row, seat), holds in zip(seats, banning, strict=True) if holds]
    if banned:
        logits[_positions([row for row, _ in banned], [ids for _, ids in banned])] = -np.inf


def _penalize(logits: F32, counted: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Repetition counts prompt and output, the others the output alone, as OpenAI and vLLM have them."""
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
    """Index of every (row, id) pair."""
    return np.repeat(np.array(rows, dtype=np.int64), [len(row_ids) for row_ids in ids]), np.concatenate(ids)
