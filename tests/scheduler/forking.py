"""What a job with several choices asks of the scheduler, and how its tests look at it."""

from collections.abc import Iterable
from typing import Any

from scheduler.plan import StepPlan
from scheduler.spec import FinishReason, RequestSpec
from tests.scheduler.driving import (
    Driver,
    make_spec,
    undisturbed_output,
)

PROMPT = tuple(range(500, 510))
CANCELLED, ERROR, LENGTH = FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.LENGTH


def choices(
    count: int, prompt: Iterable[int] = PROMPT, max_tokens: int = 6, **changes: Any
) -> list[RequestSpec]:
    """What a job with n = count becomes."""
    prompt = tuple(prompt)
    return [make_spec(f"c{i}", prompt, max_tokens, **({"fork_group": "job"} | changes)) for i in range(count)]


def num_computed(driver: Driver) -> int:
    return sum(plan.num_tokens for plan in driver.plans)


def ids_of(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.rows]


def run_to_end(driver: Driver, num_choices: int, max_tokens: int = 6) -> None:
    driver.run()
    for i in range(num_choices):
        assert driver.finish_of(f"c{i}") is LENGTH
        assert driver.output(f"c{i}") == undisturbed_output(PROMPT, max_tokens)
    assert driver.is_empty()
