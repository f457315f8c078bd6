"""Steps that begin before the previous one was waited for: pending tokens, and which rows a failure affects."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.deterministic import DeterministicRunner
from kernels.loading import load_runner
from kernels.runner import Runner
from kernels.runtime.running_step import PREDECESSOR_FAILED, LastTokens
from scheduler.plan import PENDING_TOKEN, RowResult, SamplingParams, ScheduledRow, StepPlan
from tests.kernels.driving import GREEDY
from tests.kernels.tiny import make_model, save
from tests.support.configs import deterministic_options, runner_options

PROMPTS = {"a": (7, 8, 9), "b": (10,) * 17, "c": tuple(range(20, 60))}
PENALISED = SamplingParams(seed=3, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3)
SAMPLING = {"a": GREEDY, "b": PENALISED, "c": SamplingParams(seed=1, num_logprobs=3)}
OUTSIDE = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["model", "deterministic"])
def load(request: pytest.FixtureRequest, folder: Path) -> Callable[[], Runner]:
    if request.param == "deterministic":
        return lambda: DeterministicRunner(deterministic_options(num_blocks=64))
    options = runner_options(
        str(folder), device="cpu", dtype="float32", kv_cache_bytes=1 << 21, num_threads=1
    )
    return lambda: load_runner(options)


def prompt_row(name: str, prompt: tuple[int, ...] | None = None) -> ScheduledRow:
    prompt = prompt or PROMPTS[name]
    slot, sampling = "abc".index(name), SAMPLING[name]
    history = (prompt, ()) if sampling.needs_history else None
    return ScheduledRow(name, slot, prompt, 0, table(slot, len(prompt)), sampling, 0, history)


def next_row(row: ScheduledRow, token_id: int) -> ScheduledRow:
    return replace(
        row,
        token_ids=(token_id,),
        num_computed_tokens=row.sample_position,
        block_table=table(row.slot, row.sample_position + 1),
        num_generated_tokens=row.num_generated_tokens + 1,
        history=None,
    )


def table(slot: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(8 * slot + i for i in range(-(-num_tokens // 16)))


def test_a_pending_token_gives_what_a_known_one_gives(load: Callable[[], Runner]) -> None:
    ours, theirs = load(), load()
    rows = [prompt_row(name) for name in PROMPTS]
    for step_id in range(12):
        begun = ours.begin(StepPlan(step_id, tuple(rows)))
        following = tuple(next_row(row, PENDING_TOKEN) for row in rows)
        ahead = ours.begin(StepPlan(step_id + 1, following))
        known = [
            next_row(row, result.token_id or 0) for row, result in zip(rows, begun.wait().rows, strict=True)
        ]
        assert theirs.step(StepPlan(step_id, tuple(rows))).rows == begun.wait().rows
        assert [row.error for row in ahead.wait().rows] == [None] * 3
        rows = known
    assert ahead.wait().rows == theirs.step(StepPlan(12, tuple(rows))).rows


def steps_behind_a_failure(runner: Runner, *, fails: bool) -> list[tuple[RowResult, ...]]:
    """Three steps, each begun before the previous one is waited for; in the first, a row may fail."""
    rows = [prompt_row("a"), prompt_row("b", (1, 2, OUTSIDE) if fails else (1, 2, 3)), prompt_row("c")]
    begun = []
    for step_id in range(3):
        begun.append(runner.begin(StepPlan(step_id, tuple(rows))))
        rows = [next_row(row, PENDING_TOKEN) for row in rows]
        rows.sort(key=lambda row: row.slot)
    return [step.wait().rows for step in begun]


def test_rows_behind_one_that_failed_leave_their_neighbours_alone(load: Callable[[], Runner]) -> None:
    broken, calm = (steps_behind_a_failure(load(), fails=fails) for fails in (True, False))
    assert [step[1].error for step in broken[1:]] == [PREDECESSOR_FAILED] * 2
    assert "outside the vocabulary" in (broken[0][1].error or "")
    for ours, theirs in zip(broken, calm, strict=True):
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])


def test_a_prompt_that_contains_the_pending_number_is_the_jobs_error(load: Callable[[], Runner]) -> None:
    runner = load()
    runner.step(StepPlan(0, (prompt_row("a"),)))
    alone = ScheduledRow("x", 0, (PENDING_TOKEN,), 0, (0,), GREEDY, 0)
    resumed = replace(alone, num_computed_tokens=0, num_generated_tokens=1)
    for row in (alone, resumed):
        (result,) = runner.step(StepPlan(1, (row,), released_slots=(0,))).rows
        assert "token -1 is outside the vocabulary" in (result.error or "")


def test_a_token_that_only_the_device_knows_is_told_as_its_slot() -> None:
    last, row = LastTokens(), prompt_row("b")
    last.expect(0, [row])
    assert last.resolve([next_row(row, PENDING_TOKEN)]).token_ids == {0: -2}
    last.keep(0, [row], [RowResult("b", 41)])
    assert last.resolve([next_row(row, PENDING_TOKEN)]).token_ids == {0: 41}
    assert last.known(next_row(row, PENDING_TOKEN)).token_ids == (41,)


def test_a_result_that_comes_after_the_next_step_began_does_not_replace_what_that_one_samples() -> None:
    last, row = LastTokens(), prompt_row("b")
    last.expect(0, [row])
    last.expect(1, [next_row(row, PENDING_TOKEN)])
    last.keep(0, [row], [RowResult("b", 41)])
    assert last.resolve([next_row(row, PENDING_TOKEN)]).token_ids == {0: -2}
    last.release([1])
    assert last.resolve([next_row(row, PENDING_TOKEN)]).token_ids == {}
