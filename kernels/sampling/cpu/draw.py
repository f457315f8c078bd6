"""Temperature, min-p, top-k, top-p and the draw itself, over rows that sample; and the random numbers of the draw.

Order as in vLLM: temperature, min-p, top-k, then top-p over what is left, renormalised. All three filters are
expressed as one number per row, the smallest weight that is kept. Tokens whose weights are equal are kept or
dropped together, so which of them a sort happens to put first never matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.sampling import SPAN

U64 = npt.NDArray[np.uint64]

_NUM_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox_4x32(counter: Sequence[U64], key: Sequence[U64]) -> tuple[U64, U64, U64, U64]:
    """Four random 32-bit words for each column of counter (4 arrays) and key (2 arrays) of 32-bit words.

    Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The words
    are a function of (seed, position), with no state to lose.

    All are held as uint64 so that products keep their upper halves.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1) with 53 random bits; seeds are taken modulo 2**64."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(counter)
    high, low, _, _ = philox_4x32((counter & _LOW, counter >> _32, zero, zero), (key & _LOW, key >> _32))
    bits = ((high << _32) | low) >> np.uint64(11)
    return np.asarray(bits.astype(np.float64) * 2.0**-53)


F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_CANDIDATE_TIERS = (64, 1024)
"""This many largest weights are examined first; a wider nucleus needs a full sort of its row."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """One entry per row, each [num_rows]."""

    temperature: F64
    top_k: I64
    """0 keeps the whole vocabulary."""
    top_p: F64
    min_p: F64
    uniform: F64
    """The one random number that each row uses, in [0, 1)."""


def draw(logits: torch.Tensor, best: F64, params: DrawParams) -> I64:
    """Token ids [num_rows], by inverting each row's cumulative distribution in vocabulary order.

    `logits` [num_rows, vocab_size] float32 on the CPU is overwritten; `best` holds each row's largest.
    """
    weights = logits
    weights.sub_(_column(best)).div_(_column(params.temperature)).exp_()
    floor = keep_floor(weights, params)
    token_ids = np.empty(len(floor), dtype=np.int64)
    filtered = floor > 0.0
    if not filtered.all():
        whole = np.flatnonzero(~filtered)
        token_ids[whole] = invert(_rows(weights, whole), params.uniform[whole])
    for row in np.flatnonzero(filtered).tolist():
        token_ids[row] = _invert_kept(weights[row].numpy(), floor[row], params.uniform[row])
    return token_ids


def _column(values: F64) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).unsqueeze(1)


def keep_floor(weights: torch.Tensor, params: DrawParams) -> F64:
    """[num_rows]: the smallest weight (relative to the row's largest, which is 1) that all filters keep."""
    vocab_size = weights.shape[1]
    floor = params.min_p.astype(np.float32).astype(np.float64)
    top_k = np.where(params.top_k >= vocab_size, 0, params.top_k)
    undecided = np.flatnonzero((top_k > 0) | (params.top_p < 1.0))
    if undecided.size == 0:
        return floor
    for num_candidates in _CANDIDATE_TIERS:
        few = undecided[top_k[undecided] <= num_candidates]
        if few.size and num_candidates < vocab_size:
            ordered = _rows(weights, few).topk(num_candidates, dim=1).values.numpy().astype(np.float64)
            settled = _apply_ordered(weights, few, ordered, top_k, params.top_p, floor)
            undecided = np.setdiff1d(undecided, few[settled], assume_unique=True)
    for row in undecided:
        ordered = np.sort(weights[row].numpy())[None, ::-1].astype(np.float64)
        _apply_ordered(weights, np.array([row]), ordered, top_k, params.top_p, floor)
    return floor


def _rows(weights: torch.Tensor, rows: I64) -> torch.Tensor:
    return weights if rows.size == weights.shape[0] else weights[torch.from_numpy(rows)]


def _apply_ordered(
    weights: torch.Tensor, rows: I64, ordered: F64, top_k: I64, top_p: F64, floor: F64
) -> npt.NDArray[np.bool_]:
    """Raise floor[rows], given their largest weights, `ordered` [len(rows), k] descending.

    Returns which rows were settled; the others' nuclei reach beyond `ordered` and stay as they were.
    """
    k, p, num_ordered = top_k[rows], top_p[rows], ordered.shape[1]
    kept_mass = np.where(
        (np.arange(num_ordered) < np.where(k > 0, k, num_ordered)[:, None]) & (ordered >= floor[rows, None]),
        ordered,
        0.0,
    ).cumsum(axis=1)
    total = kept_mass[:, -1].copy()
    whole = k == 0
    if num_ordered < weights.shape[1] and whole.any():
        total[whole] = _mass(weights, rows[whole], floor[rows[whole]])
    wanted = np.where(p < 1.0, p, 0.0) * total
    settled = np.asarray((k > 0) | (kept_mass[:, -1] >= wanted) | (ordered[:, -1] < floor[rows]))
    by_k = np.where(k > 0, ordered[np.arange(rows.size), np.maximum(k, 1) - 1], 0.0)
    by_p = np.where(
        p < 1.0, ordered[np.arange(rows.size), (kept_mass >= wanted[:, None]).argmax(axis=1)], 0.0
    )
    raised = np.maximum(np.maximum(by_k, by_p), floor[rows])
    floor[rows[settled]] = raised[settled]
    return settled


def _mass(weights: torch.Tensor, rows: I64, floor: F64) -> F64:
    """[len(rows)]: sum of the weights that are at least `floor`."""
    chosen = _rows(weights, rows)
    if floor.any():
        chosen = chosen * (chosen >= _column(floor))
    return np.asarray(span_sums(chosen).sum(axis=1))


def span_sums(weights: torch.Tensor) -> F64:
    """[num_rows, ceil(vocab_size / span)]: each sum depends on its span only, not on other rows."""
    num_rows, vocab_size = weights.shape
    num_full = vocab_size // SPAN
    sums = np.empty((num_rows, -(-vocab_size // SPAN)), dtype=np.float64)
    sums[:, :num_full] = _spans(weights, num_full).sum(-1).numpy()
    if num_full * SPAN < vocab_size:
        sums[:, num_full] = weights[:, num_full * SPAN :].numpy().sum(axis=1, dtype=np.float64)
    return sums


def _spans(weights: torch.Tensor, num_full: int) -> torch.Tensor:
    """[num_rows, num_full, span], a view."""
    row_stride, column_stride = weights.stride()
    return weights.as_strided(
        (weights.shape[0], num_full, SPAN), (row_stride, SPAN * column_stride, column_stride)
    )


def invert(weights: torch.Tensor, uniform: F64) -> I64:
    """[num_rows]: the first id whose cumulative weight exceeds uniform × total; never one of weight 0."""
    rows = np.arange(weights.shape[0])
    sums = span_sums(weights)
    cumulative = sums.cumsum(axis=1)
    target = uniform * cumulative[:, -1]
    span = _first_above(cumulative, sums, target)
    before = np.where(span > 0, cumulative[rows, span - 1], 0.0)
    ids = span[:, None] * SPAN + np.arange(SPAN)
    inside = np.where(
        ids < weights.shape[1], weights.numpy()[rows[:, None], np.minimum(ids, weights.shape[1] - 1)], 0.0
    ).astype(np.float64)
    return span * SPAN + _first_above(inside.cumsum(axis=1), inside, target - before)


def _invert_kept(weights: npt.NDArray[np.float32], floor: float, uniform: float) -> int:
    """`invert` for one row with few kept weights: reading only those is faster than zeroing the rest."""
    ids = np.flatnonzero(weights >= np.float32(floor))
    cumulative = weights[ids].cumsum(dtype=np.float64)
    return int(ids[min(cumulative.searchsorted(uniform * cumulative[-1], side="right"), len(ids) - 1)])


def _first_above(cumulative: F64, values: F64, target: F64) -> I64:
    """First column whose cumulative value exceeds the target; if rounding leaves none, the last non-zero."""
    first = (cumulative <= target[:, None]).sum(axis=1)
    last_positive = values.shape[1] - 1 - (values[:, ::-1] > 0).argmax(axis=1)
    return np.asarray(np.minimum(first, last_positive), dtype=np.int64)
