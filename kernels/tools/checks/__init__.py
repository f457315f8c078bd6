"""Self-checks of the GPU ops against their plain-torch references, on any device that a kernel runs on.

The tests run them in Triton's interpreter and, where there is one, on a GPU; the tuner runs an op's checks with the
candidate it wants to write down.
"""

from kernels.tools.checks.attention import CASES as ATTENTION_CASES
from kernels.tools.checks.case import Check
from kernels.tools.checks.elementwise import CASES as ELEMENTWISE_CASES
from kernels.tools.checks.memory import CASES as MEMORY_CASES
from kernels.tools.checks.sampling import CASES as SAMPLING_CASES

CHECKS: tuple[Check, ...] = (*ELEMENTWISE_CASES, *MEMORY_CASES, *ATTENTION_CASES, *SAMPLING_CASES)


def checks_of(op: str) -> tuple[Check, ...]:
    """The checks that an entry of the tuning table must pass."""
    return tuple(check for check in CHECKS if op in check.ops)


__all__ = ["CHECKS", "Check", "checks_of"]
