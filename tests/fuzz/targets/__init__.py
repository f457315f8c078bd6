"""Every target by name."""

from tests.fuzz.target import Target
from tests.fuzz.targets.commits import CommitMaps, Handovers, HeaderNames
from tests.fuzz.targets.jobs import BatchFiles, BatchLines, Jobs
from tests.fuzz.targets.models import Configs, GgufFiles, Safetensors
from tests.fuzz.targets.records import DeadLetters, Events, Results
from tests.fuzz.targets.streams import Assemblers, Readers
from tests.fuzz.targets.text import Detokenizers

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *(Jobs(), BatchLines(), BatchFiles(), Results(), Events(), DeadLetters()),
        *(CommitMaps(), Handovers(), HeaderNames(), Detokenizers(), Readers(), Assemblers()),
        *(GgufFiles(), Safetensors(), Configs()),
    )
}
