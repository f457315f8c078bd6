"""The Runner that computes: a model, its KV pool and the sampler, driven by plans."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.batch import ForwardBatch
from kernels.grammar import Grammars
from kernels.model_config import ModelConfig
from kernels.runner import FinishedStep, PendingStep
from kernels.runtime.batch_buffers import BatchBuffers
from kernels.runtime.running_step import InFlightSample, LastTokens, RunningStep
from scheduler.plan import ScheduledRow, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How many blocks the pool has, and how long a request may grow in it."""

    num_blocks: int
    block_size: int
    max_model_len: int


class Pool(Protocol):
    """Paged keys and values on some device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class Model(Protocol):
    """A model bound to a KV pool; used by one thread at a time."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kv_pool(self) -> Pool: ...

    def warmup(self) -> None: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes the batch's K/V into the pool and returns the logits [num_sampled, vocab_size] in float32.

        A token id of -1 - slot stands for the last token that the sampler chose for the slot; only samplers whose
        results are in flight cause such ids.
        """
        ...


class TokenSampler(Protocol):
    """Chooses tokens from logits that stay where the model put them. Keeps state by slot."""

    def constrain_with(self, grammars: Grammars) -> None: ...

    def release(self, slots: Sequence[int]) -> None: ...

    def warmup(self, logits: torch.Tensor) -> None:
        """Compile what sampling from such logits, float32 [1, vocab_size], may need. Not for a sampler in use."""
        ...

    def prepare(self, rows: Sequence[ScheduledRow]) -> None:
        """Called before a step's forward pass with its sampling rows; pending ones are as they were planned."""
        ...

    def start(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> InFlightSample:
        """Start choosing one token per row of logits [num_rows, vocab_size] float32.

        Pending rows with a grammar have their token by now, those with penalties if the host knows it; the others are
        as they were planned.
        """
        ...


class ModelRunner:
    """Runs plans on a model. Built on any thread, then used on the step thread only."""

    def __init__(
        self,
        model: Model,
        shape: PoolShape,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        make_sampler: Callable[[], TokenSampler],
    ) -> None:
        self._model = model
        self._shape = shape
        self._buffers = BatchBuffers(
            max_num_rows=max_num_seqs,
            max_num_tokens=max_num_batched_tokens,
            max_num_blocks=-(-shape.max_model_len // shape.block_size),
            block_size=shape.block_size,
        )
        self._make_sampler = make_sampler
        self._sampler = make_sampler()
        self._last_tokens = LastTokens()
        self._in_flight: RunningStep | None = None

    @property
    def model(self) -> Model:
        """The model, for measurements while no step runs."""
        return self._model

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def block_size(self) -> int:
        return self._shape.block_size

    @property
    def num_blocks(self) -> int:
        return self._shape.num_blocks

    @property
    def max_model_len(self) -> int:
        return self._shape.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._model.config.eos_token_ids

    @property
    def prefers_lookahead(self) -> bool:
        return self._model.kv_pool.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return self._model.kv_pool.dtype

    @property
    def kv_cache_bytes(self) -> int:
        return self._model.kv_pool.nbytes

    def constrain_with(self, grammars: Grammars) -> None:
        self._sampler.constrain_with(grammars)

    def warmup(self) -> None:
        self._model.warmup()
        self._make_sampler().warmup(torch.zeros((1, self.vocab_size), device=self._model.kv_pool.device))

    def begin(self, plan: StepPlan) -> PendingStep:
        """Each sampling row gets its own token or error; K/V of other rows is never touched."""
        started_s = time.perf_counter()
        self._sampler.release(plan.released_slots)
        self._buffers.release(plan.released_slots)
        self._last_tokens.release(plan.released_slots)
        if plan.block_copies:
            self._model.kv_pool.copy_blocks(plan.block_copies)
        if not plan.rows:
            return FinishedStep(StepResult(plan.step_id, (), time.perf_counter() - started_s))
        step = self._launch(plan, started_s)
        if step.is_done:
            step.wait()  # A row of the next step finds its token here.
        self._in_flight = step
        return step

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin(plan).wait()

    def _launch(self, plan: StepPlan, started_s: float) -> RunningStep:
        rows = plan.rows
        sampled = [row for row in rows if row.sampling is not None]
        pending = self._last_tokens.resolve(rows)
        batch = self._buffers.fill(plan, pending.token_ids)
        errors = pending.errors | self._silence_unknown_tokens(rows, batch, pending.token_ids)
        self._sampler.prepare(sampled)
        logits = self._model.forward(batch)
        sample = self._sampler.start(logits, self._with_histories(sampled))
        self._last_tokens.expect(plan.step_id, sampled)
        return RunningStep(
            plan, errors, sample, self._last_tokens, started_s=started_s, before=self._in_flight
        )

    def _with_histories(self, rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
        """A grammar's mask is made on the host, so it waits for the previous step; the forward pass runs meanwhile."""
        pending = [row for row in rows if row.is_pending and row.params.needs_history]
        if self._in_flight is not None and any(row.params.grammar is not None for row in pending):
            self._in_flight.wait()
        return [self._last_tokens.known(row) if row.params.needs_history else row for row in rows]

    def _silence_unknown_tokens(
        self, rows: Sequence[ScheduledRow], batch: ForwardBatch, pending: Mapping[int, int]
    ) -> dict[int, str]:
        """Replace ids outside the vocabulary, which would fail the whole batch's lookup; returns errors by row."""
        lowest, highest = batch.token_ids.aminmax()
        if int(lowest) >= 0 and int(highest) < self.vocab_size:
            return {}
        outside = (batch.token_ids < 0) | (batch.token_ids >= self.vocab_size)
        if pending:  # These rows have one token each and come first: row and token have the same index.
            outside[list(pending)] = False
        if not outside.any():
            return {}
        batch.token_ids[outside] = 0
        return {
            idx: f"token {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            for idx, row in enumerate(rows)
            if idx not in pending
            for token_id in row.token_ids
            if not 0 <= token_id < self.vocab_size
        }
