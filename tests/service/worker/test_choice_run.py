"""The tokens of one choice do not depend on how many steps return at once."""

import pytest

from service.text.detokenizer import Detokenizer
from service.worker.job_run import ChoiceRun

OUTPUT = b"abc<stop>def"


def choice() -> ChoiceRun:
    return ChoiceRun(0, "r", Detokenizer(lambda token_id: bytes((token_id,)), stop=("<stop>",)), frozenset())


@pytest.mark.parametrize("size", [1, 2, 3, len(OUTPUT)])
def test_hazard_async_scheduling_returns_tokens_after_a_stop_string(size: int) -> None:
    run = choice()
    text = ""
    for start in range(0, len(OUTPUT), size):
        if not run.detokenizer.stopped:
            text += run.take(tuple(OUTPUT[start : start + size]))
    assert text + run.close() == "abc"
    assert bytes(run.token_ids) == b"abc<stop>"
