"""Targets hold the step: decode cap, chunk size, admission, infeasible requests."""

from typing import Any

import pytest

from scheduler import goodput
from scheduler.goodput import ChunkBudget, DecodeGate
from scheduler.request import Request
from scheduler.scheduler_config import InfeasiblePolicy, SchedulerConfig
from scheduler.spec import FinishReason, ServiceClass
from scheduler.step_time import StepCosts, StepLoad
from tests.scheduler.driving import COSTS, Driver, load_of, make_config, make_spec, ready_model

BATCH = ServiceClass.BATCH
ROWS_ONLY = StepCosts(base_s=0.010, prefill_token_s=0.001, decode_s=0.002, context_token_s=0.0)


def request_of(tpot_s: float | None, num_prompt: int = 100, **state: Any) -> Request:
    spec = make_spec("r", num_prompt, 50, service_class=BATCH, tpot_s=tpot_s)
    request = Request.of(spec, 0, make_config())
    for name, value in state.items():
        setattr(request, name, value)
    return request


def roomy(**changes: Any) -> SchedulerConfig:
    base = {"num_blocks": 4096, "max_num_seqs": 64, "max_model_len": 8192, "max_num_batched_tokens": 512}
    return make_config(**{**base, **changes})


@pytest.mark.parametrize("limit_s", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("context", [0.0, 500.0, 4000.0])
def test_the_cap_is_the_largest_batch_that_meets_the_limit(limit_s: float, context: float) -> None:
    cap = goodput.decode_cap(COSTS, limit_s, context)
    assert COSTS.predict(StepLoad(0, cap, int(cap * context))) <= limit_s + 1e-9
    assert COSTS.predict(StepLoad(0, cap + 1, int((cap + 1) * context))) > limit_s


def test_the_cap_lets_at_least_one_through() -> None:
    assert goodput.decode_cap(COSTS, 0.001, 100.0) == 1
    assert goodput.decode_cap(StepCosts(0.01, 0.0, 0.0, 0.0), 0.1, 100.0) > 1_000_000


def test_a_target_that_cannot_be_met_alone_limits_nobody() -> None:
    assert goodput.tightest_tpot_s(COSTS, [request_of(0.005), request_of(0.5), request_of(None)]) == 0.5
    assert goodput.tightest_tpot_s(COSTS, [request_of(0.005)]) is None


def test_all_decode_while_the_step_is_within_the_limit() -> None:
    decodes = [request_of(0.05), request_of(None), request_of(None)]
    assert goodput.choose_decodes(ROWS_ONLY, decodes, 0.05, 0.0, 3) == decodes


def test_requests_without_target_give_way_to_one_with_a_tight_one() -> None:
    tight = request_of(0.05)
    loose = [request_of(None, num_skipped_steps=i % 2) for i in range(40)]
    chosen = goodput.choose_decodes(ROWS_ONLY, [*loose, tight], 0.0501, 0.0, 3)
    assert tight in chosen
    assert len(chosen) == 20
    assert ROWS_ONLY.predict(StepLoad(0, len(chosen), 0)) <= 0.0501
    assert [request.num_skipped_steps for request in chosen[:-1]].count(1) == 19, "longest skipped first"


def test_a_looser_target_waits_only_while_it_is_on_time() -> None:
    early = request_of(0.5, last_token_s=0.9)
    late = request_of(0.5, last_token_s=0.55)
    assert goodput.may_wait(early, start_s=1.0, limit_s=0.05, max_skipped_steps=9)
    assert not goodput.may_wait(late, start_s=1.0, limit_s=0.05, max_skipped_steps=9)


def test_a_pending_token_comes_when_the_step_begins_so_its_target_counts_from_there() -> None:
    request = request_of(0.5, last_token_s=0.55)
    request.num_pending_tokens = 1
    assert goodput.may_wait(request, start_s=1.0, limit_s=0.25, max_skipped_steps=9)
    assert not goodput.may_wait(request, start_s=1.0, limit_s=0.26, max_skipped_steps=9)


def test_chunk_is_the_largest_that_meets_the_limit() -> None:
    for room_s in (0.02, 0.1, 0.3):
        chunks = ChunkBudget(512, COSTS, room_s, min_tokens=1)
        size = chunks.fit(1000, 10_000)
        assert COSTS.predict(StepLoad(size, 0, 1000 + size)) - COSTS.base_s <= room_s
        assert COSTS.predict(StepLoad(size + 1, 0, 1001 + size)) - COSTS.base_s > room_s
        chunks.take(1000, size)
        assert chunks.fit(0, 100) <= 1


def test_chunk_is_limited_by_tokens_when_time_is_not() -> None:
    assert ChunkBudget(512, None, None, 16).fit(0, 10_000) == 512
    assert ChunkBudget(512, COSTS, 1e9, 16).fit(0, 100) == 100
    assert ChunkBudget(512, StepCosts(0.1, 0.0, 0.0, 0.0), 0.0, 16).fit(0, 600) == 512


def test_some_prefill_is_done_however_tight_the_target_is() -> None:
    chunks = ChunkBudget(512, COSTS, -1.0, min_tokens=16)
    assert chunks.fit(0, 100) == 16
    chunks.take(0, 10)
    assert chunks.fit(0, 100) == 6
    chunks.take(0, 6)
    assert chunks.fit(0, 100) == 0


def test_the_gate_measures_each_candidate_by_who_may_sit_out() -> None:
    running = [request_of(None) for _ in range(19)]
    gate = DecodeGate(ROWS_ONLY, [*running, request_of(0.05)], max_skipped_steps=3)
    assert not gate.admits(request_of(None)), "it must not push anybody out"
    assert gate.admits(request_of(0.05)), "the others can sit out"
    full = DecodeGate(ROWS_ONLY, [request_of(0.05) for _ in range(20)], max_skipped_steps=3)
    assert not full.admits(request_of(0.05))
    assert DecodeGate(None, running, 3).admits(request_of(0.05)), "not measured: nothing is known"


@pytest.mark.parametrize("target_s", [0.03, 0.05, 0.1])
def test_planned_steps_meet_the_tightest_target(target_s: float) -> None:
    """Long prompts arrive while streams run: no step that a target rides in is planned longer than it."""
    driver = Driver(roomy(), ready_model())
    driver.add(*(make_spec(f"s{i}", 30, 60, service_class=BATCH, tpot_s=target_s) for i in range(40)))
    driver.add(*(make_spec(f"p{i}", 2000, 2, service_class=BATCH) for i in range(3)))
    decoding: set[str] = set()
    while (plan := driver.plan()) is not None:
        assert plan.predicted_s is not None
        assert plan.predicted_s == pytest.approx(COSTS.predict(load_of(plan)), rel=0.02)
        is_floor = load_of(plan).prefill_tokens <= driver.config.min_prefill_tokens
        if any(row.request_id in decoding for row in plan.rows) and not is_floor:
            assert plan.predicted_s <= target_s
        decoding = {row.request_id for row in plan.rows if row.sampling and row.request_id.startswith("s")}
        driver.complete(plan)
    assert len({row.request_id for plan in driver.plans for row in plan.rows}) == 43


def longest_gap(driver: Driver, request_id: str) -> float:
    """Longest predicted step in which the request decoded."""
    steps = [
        plan.predicted_s or 0.0
        for plan in driver.plans
        for row in plan.rows
        if row.request_id == request_id and row.num_generated_tokens
    ]
    return max(steps)


def stream_beside_a_long_prompt(**changes: Any) -> Driver:
    driver = Driver(roomy(**changes), ready_model())
    driver.add(make_spec("stream", 20, 60, tpot_s=0.05))
    driver.step()
    driver.add(make_spec("long", 6000, 2))
    while (plan := driver.plan()) is not None:
        driver.complete(plan)
    return driver


def test_hazard_one_64k_prompt_stalls_a_live_stream() -> None:
    driver = stream_beside_a_long_prompt()
    assert longest_gap(driver, "stream") <= 0.05
    assert len(driver.output("long")) == 2


def test_control_without_goodput_the_stream_stalls() -> None:
    driver = stream_beside_a_long_prompt(enable_goodput=False)
    sizes = [plan.num_tokens for plan in driver.plans if plan.rows[0].request_id == "stream"]
    assert max(sizes) == 512, "half a second of prefill beside a target of 50 ms"


def test_no_target_however_tight_stops_progress() -> None:
    """Rows over the cap take turns; nobody sits out more than the bound, and all end."""
    driver = Driver(roomy(max_num_seqs=48, max_skipped_steps=3), ready_model(ROWS_ONLY))
    driver.add(*(make_spec(f"loose{i}", 8, 30, service_class=BATCH) for i in range(40)))
    driver.step()
    driver.add(make_spec("tight", 8, 30, service_class=BATCH, tpot_s=0.035))
    last_seen: dict[str, int] = {}
    skipped = 0
    while (plan := driver.plan()) is not None:
        for row in plan.rows:
            gap = plan.step_id - last_seen.get(row.request_id, plan.step_id - 1)
            if row.num_generated_tokens and row.request_id.startswith("loose") and len(row.token_ids) == 1:
                skipped = max(skipped, gap - 1)
            last_seen[row.request_id] = plan.step_id
        driver.complete(plan)
    assert all(len(driver.output(f"loose{i}")) == 30 for i in range(40))
    assert len(driver.output("tight")) == 30
    assert 0 < skipped <= 3
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_tight_stream_keeps_its_pace_among_many_loose_ones() -> None:
    driver = Driver(roomy(max_num_seqs=48), ready_model(ROWS_ONLY))
    driver.add(*(make_spec(f"loose{i}", 8, 40, service_class=BATCH) for i in range(30)))
    driver.step()
    driver.add(make_spec("tight", 8, 40, service_class=BATCH, tpot_s=0.05))
    driver.run()
    assert longest_gap(driver, "tight") <= 0.05 + 1e-6
    decoding = [plan for plan in driver.plans if any(row.request_id == "tight" for row in plan.rows)][1:]
    assert max(len(plan.rows) for plan in decoding) in (19, 20)
    pace = [plan.step_id for plan in decoding]
    assert pace == list(range(pace[0], pace[0] + 39)), "it decodes in every step"
    assert driver.scheduler.stats().num_preemptions == 0
    assert all(len(driver.output(f"loose{i}")) == 40 for i in range(30))


def test_the_cap_is_reported() -> None:
    driver = Driver(roomy(), ready_model(ROWS_ONLY))
    driver.add(make_spec("a", 8, 5, tpot_s=0.05))
    driver.step()
    driver.step()
    assert driver.scheduler.stats().decode_cap == pytest.approx(20, abs=1)


def deadline_run(deadline_s: float, **changes: Any) -> Driver:
    driver = Driver(roomy(**changes), ready_model())
    driver.add(
        make_spec("infeasible", 4000, 4, deadline_s=deadline_s), make_spec("other", 10, 4, arrival_s=0.1)
    )
    driver.run()
    return driver


def test_an_infeasible_request_ends_expired_before_it_burns_prefill() -> None:
    driver = deadline_run(1.0)
    assert driver.finish_of("infeasible") is FinishReason.EXPIRED
    assert all(row.request_id != "infeasible" for plan in driver.plans for row in plan.rows)
    assert driver.finish_of("other") is FinishReason.LENGTH


def test_a_request_that_can_meet_its_deadline_is_not_given_up() -> None:
    assert deadline_run(6.0).finish_of("infeasible") is FinishReason.LENGTH


def test_control_without_the_forecast_an_infeasible_request_burns_prefill() -> None:
    driver = deadline_run(1.0, enable_goodput=False)
    assert driver.finish_of("infeasible") is FinishReason.EXPIRED
    assert any(row.request_id == "infeasible" for plan in driver.plans for row in plan.rows)


def test_by_policy_an_infeasible_request_goes_behind_the_others_instead() -> None:
    driver = deadline_run(1.0, infeasible_policy=InfeasiblePolicy.RELEGATE)
    first = driver.plans[0].rows[0].request_id
    assert first == "other"
    assert driver.finish_of("infeasible") is FinishReason.EXPIRED


def test_predicted_ttft_counts_chunks_and_neighbours() -> None:
    one = goodput.predicted_ttft_s(COSTS, 512, 512, 0, 0)
    assert one == pytest.approx(COSTS.predict(StepLoad(512, 0, 512)))
    assert goodput.predicted_ttft_s(COSTS, 1024, 512, 10, 0) == pytest.approx(2 * one + 20 * COSTS.decode_s)


def test_a_request_that_would_break_the_target_waits_and_is_named() -> None:
    driver = Driver(roomy(), ready_model(ROWS_ONLY))
    driver.add(*(make_spec(f"r{i}", 8, 40, service_class=BATCH, tpot_s=0.05) for i in range(30)))
    driver.step()
    driver.step()
    stats = driver.scheduler.stats()
    assert stats.num_running in (19, 20), "10 ms and 2 ms a row within 50 ms"
    assert stats.blocked is not None
    assert (stats.blocked.request_id, stats.blocked.reason) == (f"r{stats.num_running}", "tpot")
    driver.run()
    assert all(len(driver.output(f"r{i}")) == 40 for i in range(30))


def test_a_request_kept_out_by_the_token_budget_is_named() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_spec("long", 20, 4), make_spec("next", 4, 4))
    driver.step()
    blocked = driver.scheduler.stats().blocked
    assert blocked is not None
    assert (blocked.request_id, blocked.reason) == ("next", "tokens")


def test_a_high_class_with_a_tight_target_is_not_kept_out_by_low_ones_with_loose_targets() -> None:
    driver = Driver(roomy(), ready_model(ROWS_ONLY))
    driver.add(*(make_spec(f"low{i}", 8, 200, tpot_s=0.5) for i in range(60)))
    driver.step()
    driver.add(make_spec("high", 8, 20, service_class=ServiceClass.INTERACTIVE, tpot_s=0.06))
    driver.step()
    assert driver.output("high"), "its first token came in the step after it was added"
    driver.run()
    assert longest_gap(driver, "high") <= 0.06 + 1e-6
    assert all(len(driver.output(f"low{i}")) == 200 for i in range(60))


def test_before_steps_were_measured_nothing_is_predicted_or_capped() -> None:
    driver = Driver(roomy())
    driver.add(*(make_spec(f"r{i}", 8, 4, tpot_s=0.001) for i in range(64)))
    plan = driver.step()
    assert (plan.predicted_s, len(plan.rows)) == (None, 64)


def test_whoever_sat_out_long_enough_decodes_even_past_the_limit() -> None:
    tight = [request_of(0.05) for _ in range(20)]
    starved = request_of(None, num_skipped_steps=3)
    patient = request_of(None, num_skipped_steps=2)
    chosen = goodput.choose_decodes(ROWS_ONLY, [*tight, starved, patient], 0.05, 0.0, 3)
    assert chosen == [*tight, starved]
    assert not goodput.may_wait(starved, 0.0, 0.05, max_skipped_steps=3)
