"""The Runner that computes: a model, its KV pool and the sampler, driven by plans."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.grammar import Grammars
from kernels.plan_buffers import PlanBuffers
from kernels.sampling import Sampler
from scheduler.plan import RowResult, SamplingParams, ScheduledRow, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How the pool's bytes divide, and how long a request may grow in it."""

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
    """Bound to a KV pool; used by one thread at a time."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kv_pool(self) -> Pool: ...

    def warmup(self) -> None: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes the batch's K/V into the pool and gives the logits [num_sampled, vocab_size] in float32."""
        ...


class TokenSampler(Protocol):
    """Chooses tokens from logits that stay where the model put them. Keeps state by seat."""

    def constrain_with(self, grammars: Grammars) -> None: ...

    def release(self, seats: Sequence[int]) -> None: ...

    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> list[RowResult]: ...


class ModelRunner:
    """Built anywhere, then used on the step thread only."""

    def __init__(
        self,
        model: Model,
        shape: PoolShape,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        make_sampler: Callable[[], TokenSampler] | None = None,
    ) -> None:
        self._model = model
        self._shape = shape
        self._buffers = PlanBuffers(
            max_num_rows=max_num_seqs,
            max_num_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_num_blocks=-(-shape.max_model_len // shape.block_size),
            block_size=shape.block_size,
        )
        self._make_sampler = make_sampler or (lambda: Sampler(model.config.vocab_size))
        self._sampler = self._make_sampler()

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
    def dtype(self) -> torch.dtype:
        return self._model.kv_pool.dtype

    @property
    def kv_cache_bytes(self) -> int:
        return self._model.kv_pool.nbytes

    def constrain_with(self, grammars: Grammars) -> None:
        self._sampler.constrain_with(grammars)

    def warmup(self) -> None:
        self._model.warmup()
        sampling = SamplingParams(seed=0, top_p=0.9, num_logprobs=1)
        row = ScheduledRow("warmup", 0, (0,), 0, (0,), sampling, 0)
        logits = torch.zeros((1, self.vocab_size), device=self._model.kv_pool.device)
        self._make_sampler().sample(logits, [row])

    def step(self, plan: StepPlan) -> StepResult:
        """Sampled rows get a token or an error of their own; the pool of other rows is never touched."""
        started_s = time.perf_counter()
        self._sampler.release(plan.released_seats)
        self._buffers.release(plan.released_seats)
        if plan.block_copies:
            self._model.kv_pool.copy_blocks(plan.block_copies)
        results = self._compute(plan) if plan.rows else ()
        return StepResult(plan.step_id, results, time.perf_counter() - started_s)

    def _compute(self, plan: StepPlan) -> tuple[RowResult, ...]:
        batch = self._buffers.fill(plan)
        unknown = self._silence_unknown_tokens(plan.rows, batch)
        logits = self._model.forward(batch)
        sampled = [row for row in plan.rows if row.sampling is not None]
        drawn = iter(self._sampler.sample(logits, sampled))
        results = [RowResult(row.request_id) if row.sampling is None else next(drawn) for row in plan.rows]
        for idx, error in unknown.items():
            results[idx] = RowResult(plan.rows[idx].request_id, error=error)
        return tuple(results)

    def _silence_unknown_tokens(self, rows: Sequence[ScheduledRow], batch: ForwardBatch) -> dict[int, str]:
        """Errors by row; an id outside the vocabulary would otherwise fail the lookup of the whole batch."""
        lowest, highest = batch.token_ids.aminmax()
        if int(lowest) >= 0 and int(highest) < self.vocab_size:
            return {}
        outside = (batch.token_ids < 0) | (batch.token_ids >= self.vocab_size)
        batch.token_ids[outside] = 0
        return {
            idx: f"token {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            for idx, row in enumerate(rows)
            for token_id in row.token_ids
            if not 0 <= token_id < self.vocab_size
        }
