"""When each of several steps is finished, and what happens to plans that follow a failed step."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from scheduler.plan import PENDING_TOKEN, ScheduledRow, StepPlan, StepResult
from service.engine.step_thread import StepPipeline
from service.errors import InternalError
from tests.service.engine.scripted import Queued, Scripted, answer, pending, row


class Posts:
    """A pipeline, and what it posted so far: (step id, tokens by request) or an error."""

    def __init__(self, runner: Scripted) -> None:
        self.seen: list[tuple[int, dict[str, int | None]] | BaseException] = []
        self.pipeline = StepPipeline(runner, lambda _, value: self._take(value))
        self._loop = asyncio.new_event_loop()

    def begin(self, step_id: int, *rows: ScheduledRow) -> None:
        self.pipeline.begin(StepPlan(step_id, rows), self._loop.create_future())

    def close(self) -> None:
        self._loop.close()

    def _take(self, value: StepResult | BaseException) -> None:
        if isinstance(value, BaseException):
            self.seen.append(value)
        else:
            self.seen.append((value.step_id, {r.request_id: r.token_id for r in value.rows}))


PostsOf = Callable[[Scripted], Posts]


@pytest.fixture
def posts_of() -> Iterator[Callable[[Scripted], Posts]]:
    made: list[Posts] = []

    def make(runner: Scripted) -> Posts:
        made.append(Posts(runner))
        return made[-1]

    yield make
    for posts in made:
        posts.close()


def test_a_step_is_finished_when_the_next_has_begun_or_when_nothing_follows(posts_of: PostsOf) -> None:
    posts = posts_of(Queued(answer))
    posts.begin(0, row("a"))
    assert posts.seen == []
    posts.begin(1, pending("a"))
    assert posts.seen == [(0, {"a": 5})]
    posts.pipeline.flush()
    assert posts.seen == [(0, {"a": 5}), (1, {"a": 5})]
    posts.pipeline.flush()
    assert len(posts.seen) == 2


def test_a_step_that_finishes_at_once_is_not_kept(posts_of: PostsOf) -> None:
    posts = posts_of(Scripted(answer))
    posts.begin(0, row("a"))
    assert posts.seen == [(0, {"a": 5})]


@pytest.mark.parametrize("runner", [Scripted, Queued])
def test_a_plan_that_follows_a_failed_step_never_sees_its_state(
    runner: type[Scripted], posts_of: PostsOf
) -> None:
    ran: list[tuple[int, tuple[tuple[str, int], ...]]] = []

    def step(step_plan: StepPlan) -> StepResult:
        if any(r.request_id == "bad" for r in step_plan.rows):
            raise ZeroDivisionError
        ran.append((step_plan.step_id, tuple((r.request_id, r.token_ids[0]) for r in step_plan.rows)))
        return answer(step_plan)

    posts = posts_of(runner(step))
    posts.begin(0, row("good"), row("bad"))
    posts.begin(1, pending("good"), pending("bad"))
    posts.begin(2, pending("good"), row("new"))
    posts.pipeline.flush()
    assert ran == [
        (0, (("good", 1),)),
        (1, (("good", 5),)),
        (2, (("good", PENDING_TOKEN), ("new", 1))),
    ]
    assert posts.seen == [
        (0, {"good": 5, "bad": None}),
        (1, {"good": 5, "bad": None}),
        (2, {"good": 5, "new": 5}),
    ]


@pytest.mark.parametrize("runner", [Scripted, Queued])
def test_no_step_runs_after_a_fault_of_the_engine(runner: type[Scripted], posts_of: PostsOf) -> None:
    ran: list[str] = []

    def step(step_plan: StepPlan) -> StepResult:
        ran.extend(r.request_id for r in step_plan.rows)
        raise MemoryError

    posts = posts_of(runner(step))
    posts.begin(0, row("a"), row("b"))
    ran_before = len(ran)
    posts.begin(1, row("c"))
    posts.pipeline.flush()
    posts.begin(2, row("d"))
    first, *others = posts.seen
    assert isinstance(first, InternalError)
    assert others == [first, first]
    assert "d" not in ran
    assert runner is Queued or len(ran) == ran_before
