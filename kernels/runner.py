"""The interface between the step thread and what computes tokens. Importing this module imports no torch."""

from dataclasses import dataclass
from typing import Literal, Protocol

from kernels.grammar import Grammars
from scheduler.plan import StepPlan, StepResult

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
Bf16Product = Literal["auto", "dot", "fma"]


class PendingStep(Protocol):
    """A step in flight."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once, so that beginning the next step first gains nothing."""
        ...

    def wait(self) -> StepResult:
        """Return the result; call in the order of `begin`. Raises what the step raised, a bug in the runner."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was computed when it began."""

    result: StepResult

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class Runner(Protocol):
    """Turns plans into tokens. Built anywhere, then used on the step thread only."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that one request may have."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def prefers_lookahead(self) -> bool:
        """Whether steps run asynchronously to the host, so that planning the next one meanwhile saves time."""
        ...

    def constrain_with(self, grammars: Grammars) -> None:
        """Call before the first step, on any thread. Without it, rows with a grammar end in an error."""
        ...

    def warmup(self) -> None:
        """Compile and touch everything that a step needs, so that the first step is no slower than others."""
        ...

    def begin(self, plan: StepPlan) -> PendingStep:
        """Start one step. Steps run strictly in this order; a second may begin before the first is waited for.

        A row that fails says so in its RowResult; an exception means a bug in the runner. A pending row whose previous
        step failed gives some result or error and does not affect other rows.
        """
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Begin a step and wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What a model is loaded with: settings of the same names, which are checked where they are read."""

    model: str
    """A folder, a .gguf file or a known name."""
    device: Device
    dtype: Dtype
    """auto: bfloat16 where the processor multiplies it natively or our kernels do, else float32."""
    quantization: Quantization
    bf16_product: Bf16Product
    """How the CPU multiplies bfloat16: one way per process, so its models must agree. auto: the quicker one."""
    block_size: int
    kv_cache_bytes: int
    max_num_seqs: int
    max_model_len: int | None
    """None: as long as the model and the pool allow."""
    max_num_batched_tokens: int
    num_threads: int | None
    """None: torch's choice."""
