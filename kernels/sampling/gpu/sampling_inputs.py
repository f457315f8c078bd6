"""What the host knows of the sampling rows, as tensors to upload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.sampling.gpu import Allowed, Bias, Histories, Penalties, SamplingInputs, SlotCounts
from kernels.sampling.rules import GREEDY_BELOW, outside
from scheduler.plan import ScheduledRow


@dataclass(frozen=True, slots=True)
class RowParams:
    """One row's parameters as plain numbers."""

    parameters: tuple[float, float, float, float, float, float]
    top_k: int
    seed: int
    position: int
    slot: int
    has_penalties: bool
    bias: Mapping[int, float]
    history: Mapping[int, int]
    """The new entry of the slot's counts for each token, if the row resets them; else empty"""


def row_error(row: ScheduledRow, vocab_size: int) -> str | None:
    """Return why the row cannot be sampled: it names an id outside the vocabulary. None: it can."""
    params = row.params
    error = outside("logit_bias", (token_id for token_id, _ in params.logit_bias), vocab_size)
    if error is None and params.has_penalties and row.history is not None:
        error = outside("history", (*row.history[0], *row.history[1]), vocab_size)
    return error


def prepare(row: ScheduledRow, vocab_size: int, error: str | None) -> RowParams:
    """Return the parameters of a row; if it has an `error`, without the invalid ones."""
    params = row.params
    bias = dict(params.logit_bias) if error is None else {}
    if params.grammar is None and row.is_banning:  # a grammar's mask includes the bans
        bias |= {token_id: -torch.inf for token_id in params.banned_token_ids if 0 <= token_id < vocab_size}
    has_penalties = params.has_penalties and error is None
    return RowParams(
        parameters=(
            params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        ),
        top_k=params.top_k if params.top_k < vocab_size else 0,
        seed=params.seed,
        position=row.sample_position,
        slot=row.slot,
        has_penalties=has_penalties,
        bias=bias,
        history=_counts_of(*row.history) if has_penalties and row.history is not None else {},
    )


def _counts_of(prompt: Sequence[int], generated: Sequence[int]) -> dict[int, int]:
    """The encoding of SlotCounts: twice the times generated, plus 1 if in the prompt."""
    counts = dict.fromkeys(prompt, 1)
    for token_id in generated:
        counts[token_id] = counts.get(token_id, 0) + 2
    return counts


def host_tensors(rows: Sequence[RowParams]) -> dict[str, torch.Tensor]:
    """Return what is known before the forward pass as host tensors, which `sampling_inputs` reads on the device.

    parameters [num_rows, 6] float64; seeds and positions [num_rows] int64; top_ks, slots and counted_slots [num_rows]
    int32. bias and history, if any, are each _start [num_rows + 1] int32, _ids [n] int32 and _values [n], float32 for
    bias and int32 for history.
    """
    tensors = {
        "parameters": torch.tensor([row.parameters for row in rows], dtype=torch.float64),
        "seeds": torch.tensor([_as_signed(row.seed) for row in rows], dtype=torch.int64),
        "positions": torch.tensor([row.position for row in rows], dtype=torch.int64),
        "top_ks": torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        "slots": torch.tensor([row.slot for row in rows], dtype=torch.int32),
    }
    if any(row.bias for row in rows):
        tensors |= _ragged("bias", [row.bias for row in rows], torch.float32)
    if any(row.has_penalties for row in rows):
        slots = [row.slot if row.has_penalties else -1 for row in rows]
        tensors["counted_slots"] = torch.tensor(slots, dtype=torch.int32)
    if any(row.history for row in rows):
        tensors |= _ragged("history", [row.history for row in rows], torch.int32)
    return tensors


def mask_tensors(masks: Mapping[int, npt.NDArray[np.int32]], num_rows: int) -> dict[str, torch.Tensor]:
    """Return the tensors of Allowed. masks: by index of the row, [ceil(vocab_size / 32)] int32 each."""
    lines = torch.full((num_rows,), -1, dtype=torch.int32)
    lines[list(masks)] = torch.arange(len(masks), dtype=torch.int32)
    return {"lines": lines, "words": torch.from_numpy(np.stack(list(masks.values())))}


def sampling_inputs(
    on_device: Mapping[str, torch.Tensor],
    ring: torch.Tensor,
    counts: SlotCounts | None,
    allowed: Allowed | None,
) -> SamplingInputs:
    """Combine uploaded tensors, shaped as `host_tensors` gives them, with what is kept on the device.

    ring: [num_slots, n] int32, as in SamplingInputs. counts: required if `host_tensors` found penalties.
    """
    bias = penalties = histories = None
    if "bias_start" in on_device:
        bias = Bias(on_device["bias_start"], on_device["bias_ids"], on_device["bias_values"])
    if "history_start" in on_device:
        histories = Histories(
            on_device["history_start"], on_device["history_ids"], on_device["history_values"]
        )
    if "counted_slots" in on_device:
        assert counts is not None, "rows with penalties, but no counts"
        penalties = Penalties(on_device["counted_slots"], counts, histories)
    plain = {name: on_device[name] for name in ("parameters", "top_ks", "seeds", "positions", "slots")}
    return SamplingInputs(**plain, ring=ring, bias=bias, penalties=penalties, allowed=allowed)


def _ragged(name: str, rows: Sequence[Mapping[int, float]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    starts = np.cumsum([0, *(len(row) for row in rows)])
    return {
        f"{name}_start": torch.from_numpy(starts.astype(np.int32)),
        f"{name}_ids": torch.tensor([token_id for row in rows for token_id in row], dtype=torch.int32),
        f"{name}_values": torch.tensor([value for row in rows for value in row.values()], dtype=dtype),
    }


def _as_signed(seed: int) -> int:
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >= 1 << 63 else seed
