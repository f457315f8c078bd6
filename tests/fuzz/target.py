"""What is fuzzed: makes an input from a random number generator, and checks what the code does with it."""

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, ClassVar


class Outcome(StrEnum):
    """Both are right; anything else that happens is a fault."""

    ACCEPTED = "accepted"
    REFUSED = "refused"


class CheckError(AssertionError):
    """The code neither parsed an input correctly nor refused it cleanly."""


def expect(holds: bool, what: str, *details: Any) -> None:
    if not holds:
        raise CheckError(f"{what}: {', '.join(f'{detail!r:.600}' for detail in details)}")


@dataclass(frozen=True)
class Target:
    """The same seed makes the same input; the function under test is a field, so that a control can break it."""

    name: ClassVar[str]
    share: ClassVar[float] = 1.0
    """Of the inputs of a run over all targets, relative to the others: fewer for what takes long."""

    def make(self, rng: Random) -> Any:
        raise NotImplementedError

    def check(self, case: Any) -> Outcome:
        """Raises CheckError, or lets through what the code raised and should not have."""
        raise NotImplementedError
