"""Every target by name."""

from tests.fuzz.target import Target
from tests.fuzz.targets.jobs import BatchFiles, BatchLines, Jobs
from tests.fuzz.targets.records import DeadLetters, Events, Results

TARGETS: dict[str, Target] = {
    target.name: target for target in (Jobs(), BatchLines(), BatchFiles(), Results(), Events(), DeadLetters())
}
