"""Decodes the integers that are read back from the device into one result per row."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.sampling.gpu import STATUS_OK, Sampled
from kernels.ops.sampling.gpu_kernel import STATUS_BAD_LOGITS
from kernels.runtime.gpu.read_back import Fetched
from kernels.sampling.rules import NO_LOGIT, NO_TOKEN, NUM_TOP
from scheduler.plan import RowResult, ScheduledRow, TokenLogprobs


def wanting_logprobs(rows: Sequence[ScheduledRow]) -> list[int]:
    """Return the indices of the rows that asked for log-probabilities."""
    return [idx for idx, row in enumerate(rows) if row.params.num_logprobs is not None]


def _num_top(rows: Sequence[ScheduledRow], vocab_size: int) -> int:
    return min(max(NUM_TOP, *(row.params.num_logprobs or 0 for row in rows)), vocab_size)


def pack(
    logits: torch.Tensor, sampled: Sampled, rows: Sequence[ScheduledRow], wanted: torch.Tensor | None
) -> torch.Tensor:
    """Return all that the host reads back, as one int32 tensor [num_values] on the device.

    logits are [num_rows, vocab_size] float32, `wanted` [n] int64 the rows with log-probabilities.
    """
    packed = sampled.packed.flatten()
    if wanted is None:
        return packed
    raw = logits[wanted]
    values, ids = raw.topk(_num_top(rows, raw.shape[1]), dim=1)
    # The kernel's normalizer keeps the chosen token's value consistent with the listed ones.
    chosen = raw.gather(1, sampled.token_ids[wanted].long().unsqueeze(1))
    normalizer = chosen - sampled.logprobs[wanted].unsqueeze(1)
    top = (values - normalizer).view(torch.int32)
    return torch.cat((packed, top.flatten(), ids.to(torch.int32).flatten()))


class SamplingResults:
    """An InFlightSample whose results are being copied to the host."""

    def __init__(
        self, fetched: Fetched, rows: Sequence[ScheduledRow], errors: Sequence[str | None], vocab_size: int
    ) -> None:
        """errors: by row, None unless the row fails whatever was sampled for it."""
        self._fetched = fetched
        self._rows = rows
        self._errors = errors
        self._vocab_size = vocab_size

    @property
    def is_done(self) -> bool:
        return self._fetched.is_done

    def wait(self) -> list[RowResult]:
        values = self._fetched.wait()
        num_rows, wanted = len(self._rows), wanting_logprobs(self._rows)
        num_top = _num_top(self._rows, self._vocab_size) if wanted else 0
        head, tail = np.split(values, [len(values) - 2 * len(wanted) * num_top])
        token_ids, statuses, chosen = head.reshape(3, -1)[:, :num_rows]
        top = tail.reshape(2, len(wanted), num_top)
        logprobs = {
            idx: _listed(self._rows[idx], chosen[idx : idx + 1], top[:, line])
            for line, idx in enumerate(wanted)
        }
        return [
            _result(row, int(token_ids[idx]), int(statuses[idx]), self._errors[idx], logprobs.get(idx))
            for idx, row in enumerate(self._rows)
        ]


def _listed(row: ScheduledRow, chosen: npt.NDArray[np.int32], top: npt.NDArray[np.int32]) -> TokenLogprobs:
    """`top` [2, n] are values and ids."""
    count = row.params.num_logprobs or 0
    values = top[0].view(np.float32).tolist()
    ordered = sorted(zip(top[1].tolist(), values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(float(chosen.view(np.float32)[0]), tuple(ordered[:count]))


def _result(
    row: ScheduledRow, token_id: int, status: int, error: str | None, logprobs: TokenLogprobs | None
) -> RowResult:
    if status == STATUS_BAD_LOGITS:
        return RowResult(row.request_id, error=NO_LOGIT)
    if error is not None or status != STATUS_OK:
        return RowResult(row.request_id, error=error or NO_TOKEN)
    return RowResult(row.request_id, token_id=token_id, logprobs=logprobs)
