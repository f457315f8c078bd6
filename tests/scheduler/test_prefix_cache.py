"""Prefix hits: who gets them, how much, and that they never change an output."""

import pytest

from tests.scheduler.driving import Driver, make_config, make_spec, undisturbed_output

PROMPT = tuple(range(18))


def warmed(**changes: bool) -> Driver:
    driver = Driver(make_config(**changes))
    driver.add(make_spec("first", PROMPT, 3))
    driver.run()
    return driver


def test_an_equal_prompt_computes_only_what_is_not_cached() -> None:
    driver = warmed()
    driver.add(make_spec("second", PROMPT, 3))
    row = driver.step().rows[0]
    assert (row.num_computed_tokens, row.token_ids) == (16, PROMPT[16:])
    driver.run()
    assert driver.end("second").num_cached_tokens == 16
    assert driver.output("second") == driver.output("first") == undisturbed_output(PROMPT, 3)
    stats = driver.scheduler.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (36, 16)


@pytest.mark.parametrize("length", [4, 8, 16])
def test_the_last_token_of_a_prompt_is_never_taken_from_the_cache(length: int) -> None:
    driver = warmed()
    driver.add(make_spec("second", PROMPT[:length], 3))
    row = driver.step().rows[0]
    assert row.num_computed_tokens == length - 4
    assert len(row.token_ids) == 4
    assert row.sampling is not None
    driver.run()
    assert driver.output("second") == undisturbed_output(PROMPT[:length], 3)


def test_generated_tokens_are_found_too_when_a_conversation_goes_on() -> None:
    driver = Driver()
    driver.add(make_spec("first", PROMPT, 11))
    driver.run()
    longer = PROMPT + driver.output("first") + (5, 6, 7)
    driver.add(make_spec("second", longer, 3))
    assert driver.step().rows[0].num_computed_tokens == 28
    driver.run()
    assert driver.output("second") == undisturbed_output(longer, 3)


def test_running_requests_share_blocks_that_are_computed() -> None:
    driver = Driver()
    driver.add(make_spec("first", PROMPT, 9))
    driver.step()
    driver.add(make_spec("second", PROMPT, 9))
    plan = driver.step()
    tables = [set(row.block_table) for row in plan.rows]
    assert len(tables[0] & tables[1]) == 4
    assert driver.scheduler.stats().held_blocks == len(tables[0] | tables[1])
    driver.run()
    assert driver.output("first") == driver.output("second")
    assert driver.is_empty()


def test_blocks_are_not_shared_before_their_step_has_returned() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64))
    driver.add(make_spec("first", PROMPT, 3), make_spec("second", PROMPT, 3))
    plan = driver.step()
    assert [row.num_computed_tokens for row in plan.rows] == [0, 0]


def test_hazard_tenants_do_not_see_each_other_s_prompts() -> None:
    driver = warmed()
    driver.add(make_spec("other", PROMPT, 3, tenant="b"))
    assert driver.step().rows[0].num_computed_tokens == 0
    driver.run()
    assert driver.end("other").num_cached_tokens == 0


def test_control_without_the_tenant_salt_another_tenant_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.request.tenant_salt", lambda tenant: b"")
    driver = warmed()
    driver.add(make_spec("other", PROMPT, 3, tenant="b"))
    assert driver.step().rows[0].num_computed_tokens == 16


def test_switched_off_nothing_is_found() -> None:
    driver = warmed(prefix_caching=False)
    assert driver.scheduler.stats().cached_blocks == 0
    driver.add(make_spec("second", PROMPT, 3))
    assert driver.step().rows[0].num_computed_tokens == 0


def test_cached_blocks_give_way_to_new_requests() -> None:
    driver = Driver(make_config(num_blocks=8))
    for i in range(10):
        driver.add(make_spec(f"r{i}", 20, 8))
        driver.run()
    assert all(driver.output(f"r{i}") for i in range(10))
    assert driver.is_empty()


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    driver = Driver(make_config(num_blocks=11, max_num_seqs=2))
    driver.add(make_spec("a", 16, 10), make_spec("b", 16, 10))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    readmitted = [
        row
        for plan in driver.plans
        for row in plan.rows
        if row.request_id == "b" and row.num_generated_tokens
    ]
    assert any(len(row.token_ids) > 1 and row.num_computed_tokens > 0 for row in readmitted)
    assert driver.output("b") == undisturbed_output(make_spec("b", 16).prompt_token_ids, 10)
