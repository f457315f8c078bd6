"""The sampler of a model on the GPU. Its rules are those of the CPU, but logits and tokens stay on the device."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.grammar import Grammars, GrammarSlots
from kernels.ops.sampling.gpu import Allowed, SlotCounts, sample
from kernels.runtime.gpu.read_back import ResultBuffers
from kernels.runtime.gpu.step_inputs import StepInputs
from kernels.sampling.gpu.sampling_inputs import (
    host_tensors,
    mask_tensors,
    prepare,
    row_error,
    sampling_inputs,
)
from kernels.sampling.gpu.sampling_results import SamplingResults, pack, wanting_logprobs
from kernels.sampling.rules import rule_of
from scheduler.plan import RowResult, SamplingParams, ScheduledRow

_PLAIN = SamplingParams(seed=0, top_p=0.9, num_logprobs=1)


class GpuSampler:
    """Keeps the counts that penalties need, by slot, on the device. Step thread only.

    A row whose newest token only the device knows is sampled like any other, unless it has a grammar.
    """

    def __init__(self, vocab_size: int, inputs: StepInputs) -> None:
        self._vocab_size = vocab_size
        self._inputs = inputs
        self._results = ResultBuffers(inputs.copies)
        self._counts: SlotCounts | None = None
        self._grammar_slots = GrammarSlots()
        self._prepared: list[ScheduledRow] = []
        self._errors: list[str | None] = []

    def constrain_with(self, grammars: Grammars) -> None:
        """Call before the first row with a grammar; without it such a row ends in an error."""
        self._grammar_slots = GrammarSlots(grammars)

    def release(self, slots: Iterable[int]) -> None:
        """Counts stay allocated; the slot's next request overwrites them."""
        self._grammar_slots.release(slots)

    def warmup(self, logits: torch.Tensor) -> None:
        """Compile all kernel variants, with float32 logits [1, vocab_size]; a missing one delays a step by seconds."""
        zero = torch.zeros(1, dtype=torch.int32, device=logits.device)
        anything = Allowed(zero, torch.full((1, -(-self._vocab_size // 32)), -1, device=logits.device).int())
        biased = replace(_PLAIN, logit_bias=((0, 1.0),))
        penalized = replace(_PLAIN, presence_penalty=1.0)
        for sampling, history in ((_PLAIN, None), (biased, None), (penalized, ((0,), ())), (penalized, None)):
            for allowed in (None, anything):
                self.prepare([ScheduledRow("warmup", 0, (0,), 0, (0,), sampling, 0, history)])
                self._launch(logits, allowed).wait()

    def prepare(self, rows: Sequence[ScheduledRow]) -> None:
        """Call before the forward pass, so that what is known of its sampling rows is uploaded with its batch."""
        self._prepared = list(rows)
        self._errors = [row_error(row, self._vocab_size) for row in rows]
        params = [
            prepare(row, self._vocab_size, error) for row, error in zip(rows, self._errors, strict=True)
        ]
        tensors = host_tensors(params) if rows else {}
        if wanted := wanting_logprobs(rows):
            tensors["wanted"] = torch.tensor(wanted, dtype=torch.int64)
        if self._counts is None and "counted_slots" in tensors:
            self._counts = self._make_counts()
        self._inputs.add(tensors)

    def start(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> SamplingResults:
        """Start choosing a token for each row of `logits` [num_rows, vocab_size] float32, which stay unchanged.

        The rows are those of the last `prepare`, with their tokens where there is a grammar. Does not wait for the
        device. Masks are made here, while the device computes the logits, and are uploaded separately.
        """
        assert len(self._prepared) == len(rows), f"{len(rows)} rows, {len(self._prepared)} were prepared"
        allowed = None
        if masks := self._masks(rows, self._errors):
            allowed = Allowed(**self._inputs.staging.upload(mask_tensors(masks, len(rows))))
        return self._launch(logits, allowed)

    def _launch(self, logits: torch.Tensor, allowed: Allowed | None) -> SamplingResults:
        prepared, errors = self._prepared, self._errors
        self._prepared, self._errors = [], []
        on_device = self._inputs.take()
        if prepared:
            sampled = sample(logits, sampling_inputs(on_device, self._inputs.ring, self._counts, allowed))
            packed = pack(logits, sampled, prepared, on_device.get("wanted"))
        else:  # There is nothing to read, but the step is done when the device reaches this point.
            packed = torch.empty(0, dtype=torch.int32, device=self._inputs.device)
        return SamplingResults(self._results.fetch(packed), prepared, errors, self._vocab_size)

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> list[RowResult]:
        """Prepare and start sampling from float32 logits [num_rows, vocab_size], then wait for the device."""
        self.prepare(rows)
        return self.start(logits, rows).wait()

    def _masks(
        self, rows: Sequence[ScheduledRow], errors: list[str | None]
    ) -> dict[int, npt.NDArray[np.int32]]:
        """Return masks by index of the rows with a grammar; write the reason into `errors` for a row without one."""
        masks = {}
        for idx, row in enumerate(rows):
            if row.params.grammar is None:
                continue
            rule = rule_of(row, self._grammar_slots, errors[idx])
            errors[idx] = rule.error
            if rule.allowed is not None:
                words = rule.allowed.words
                banned = row.params.banned_token_ids
                masks[idx] = _without(words, banned, self._vocab_size) if rule.bans else words
        return masks

    def _make_counts(self) -> SlotCounts:
        """Allocate counts when first needed: many deployments never do, and they take vocab_size * 4 bytes per slot."""
        slots, device = self._inputs.max_num_seqs, self._inputs.device
        return SlotCounts(
            torch.zeros((slots, self._vocab_size), dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
        )


def _without(
    words: npt.NDArray[np.int32], token_ids: Iterable[int], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Return the mask without these tokens; ids outside the vocabulary are ignored."""
    cleared = words.copy()
    bits = cleared.view(np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            bits[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
    return cleared
