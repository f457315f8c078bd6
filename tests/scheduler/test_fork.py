"""Choices of one job: the prompt is computed once, its blocks exist once, and outputs are those of requests alone."""

from typing import Any

import pytest

from scheduler.forks import Forks
from scheduler.spec import ServiceClass
from scheduler.state import State
from tests.scheduler.driving import (
    STOP,
    Driver,
    PagedModel,
    make_config,
    make_spec,
    undisturbed_output,
)
from tests.scheduler.forking import CANCELLED, PROMPT, choices, ids_of, num_computed, run_to_end


@pytest.mark.parametrize("has_cache", [True, False])
def test_eight_choices_hold_the_full_prompt_blocks_once_and_one_block_each(has_cache: bool) -> None:
    config = make_config(
        num_blocks=64,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        prefix_caching=has_cache,
    )
    driver = Driver(config)
    driver.add(*choices(8, range(100), 20))
    first = driver.step()
    assert [(row.request_id, len(row.token_ids)) for row in first.rows] == [("c0", 100)]
    second = driver.step()
    assert [len(row.token_ids) for row in second.rows] == [1] * 8
    assert len(second.block_copies) == 7
    assert {source for source, _ in second.block_copies} == {first.rows[0].block_table[6]}
    assert driver.scheduler.stats().held_blocks == 6 + 8
    assert driver.scheduler.stats().num_forks == 7
    third = driver.step()
    assert [row.num_computed_tokens for row in third.rows] == [101] + [100] * 7
    assert driver.scheduler.stats().held_blocks == 6 + 8
    driver.run()
    assert all(driver.output(f"c{i}") == undisturbed_output(range(100), 20) for i in range(8))


@pytest.mark.parametrize(
    ("num_prompt", "num_shared", "num_copies"), [(97, 6, 0), (96, 5, 7), (95, 5, 7), (16, 0, 7), (1, 0, 0)]
)
def test_only_a_block_that_the_last_prompt_token_shares_with_others_is_copied(
    num_prompt: int, num_shared: int, num_copies: int
) -> None:
    """The last token is computed again in each choice, into a block of its own: its logits are wanted."""
    driver = Driver(make_config(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=128))
    driver.add(*choices(8, range(num_prompt), 5))
    driver.step()
    second = driver.step()
    assert len(second.block_copies) == num_copies
    shared = set.intersection(*(set(row.block_table) for row in second.rows))
    assert len(shared) == num_shared
    driver.run()
    assert all(driver.output(f"c{i}") == undisturbed_output(range(num_prompt), 5) for i in range(8))
    assert num_computed(driver) == num_prompt + 7 + 8 * 4


@pytest.mark.parametrize("num_choices", [1, 4, 16])
def test_a_prompt_of_a_thousand_tokens_is_computed_once_in_chunks(num_choices: int) -> None:
    driver = Driver(
        make_config(
            num_blocks=128, block_size=16, max_num_seqs=16, max_model_len=1024, max_num_batched_tokens=256,
            prefix_caching=False,
        )
    )  # fmt: skip
    driver.add(*choices(num_choices, range(1000), 2))
    driver.run()
    assert num_computed(driver) == 1000 + (num_choices - 1) + num_choices
    assert [ids_of(plan) for plan in driver.plans[:4]] == [["c0"]] * 4


def test_control_without_a_group_each_choice_computes_the_prompt() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64))
    driver.add(*choices(4, fork_group=None))
    run_to_end(driver, 4)
    assert num_computed(driver) == 4 * (10 + 5)


def test_control_without_the_copies_outputs_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedModel, "_copy", lambda self, source, destination: None)
    driver = Driver()
    driver.add(*choices(4))
    with pytest.raises((AssertionError, KeyError)):
        run_to_end(driver, 4)


def test_a_preempted_fork_comes_back_with_the_prompt_and_computes_only_its_own_tokens() -> None:
    driver = Driver(make_config(num_blocks=10, max_num_seqs=3, watermark_blocks=0, prefix_caching=False))
    driver.model.stop_after["c1"] = 9
    stops = frozenset((STOP,))
    driver.add(*choices(3, max_tokens=14, stop_token_ids=stops))
    driver.run()
    for name in ("c0", "c2"):
        assert driver.output(name) == undisturbed_output(PROMPT, 14)
    assert driver.is_empty()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_forks > 2
    prompts = [row for plan in driver.plans for row in plan.rows if row.num_computed_tokens == 0]
    assert [row.request_id for row in prompts] == ["c0"]


def test_a_preempted_request_takes_its_own_cached_blocks_where_they_reach_further_than_the_prompt() -> None:
    driver = Driver(make_config(max_num_seqs=2, max_num_batched_tokens=64))
    batch = ServiceClass.BATCH
    driver.add(*choices(2, max_tokens=30, service_class=batch))
    while len(driver.output("c1")) < 9:
        driver.step()
    driver.add(make_spec("high", 2, 1, service_class=ServiceClass.INTERACTIVE, arrival_s=driver.now_s))
    driver.step()
    assert driver.scheduler.stats().num_preempted == 1
    again = next(row for row in driver.step().rows if row.request_id == "c1")
    assert again.num_computed_tokens == 16
    driver.run()
    assert driver.output("c1") == undisturbed_output(PROMPT, 30)


def test_resumed_choices_share_the_prompt_and_compute_their_own_tokens() -> None:
    whole = undisturbed_output(PROMPT, 9)
    driver = Driver(make_config(max_num_batched_tokens=64, prefix_caching=False))
    driver.add(
        *(
            make_spec(f"c{i}", PROMPT, 9, fork_group="job", generated_token_ids=whole[:known])
            for i, known in enumerate((5, 0, 3, 9))
        )
    )
    assert [(row.request_id, len(row.token_ids)) for row in driver.step().rows] == [("c0", 15)]
    second = {row.request_id: row for row in driver.step().rows}
    assert (second["c1"].num_computed_tokens, second["c1"].token_ids) == (9, PROMPT[9:])
    assert (second["c2"].num_computed_tokens, second["c2"].token_ids) == (10, whole[:3])
    driver.run()
    for i, known in enumerate((5, 0, 3, 9)):
        assert driver.output(f"c{i}") == whole[known:]
    assert driver.is_empty()


def test_copies_of_one_plan_never_chain_even_if_a_resumed_fork_could_lend_at_once() -> None:
    """c1 came first and has the whole prompt as soon as it is admitted, but its last block only when the plan runs."""
    whole = undisturbed_output(PROMPT, 8)
    driver = Driver(make_config(prefix_caching=False))
    for name, known, arrival_s in (("c1", 3, 1.0), ("c0", 0, 0.0), ("c2", 3, 2.0)):
        driver.add(
            make_spec(
                name, PROMPT, 8, fork_group="job", generated_token_ids=whole[:known], arrival_s=arrival_s
            )
        )
    [first] = driver.step().rows
    assert first.request_id == "c0"
    assert [source for source, _ in driver.step().block_copies] == [first.block_table[2]] * 2
    driver.run()
    assert [driver.output(name) for name in ("c0", "c1", "c2")] == [whole, whole[3:], whole[3:]]


def test_a_fork_that_gives_way_in_the_round_that_admits_it_leaves_no_copy() -> None:
    driver = Driver(make_config(max_num_seqs=2, ageing_s=1.0))
    batch, interactive = ServiceClass.BATCH, ServiceClass.INTERACTIVE
    first, second = choices(2, max_tokens=20, service_class=batch)
    driver.add(first)
    driver.step()
    driver.now_s = 100.0
    driver.add(second, make_spec("high", 4, 2, service_class=interactive, arrival_s=100.0))
    plan = driver.step()
    assert (ids_of(plan), plan.block_copies) == (["c0", "high"], ())
    assert driver.scheduler.stats().num_forks == 1
    run_to_end(driver, 2, max_tokens=20)


def test_a_copy_s_source_is_nobody_s_to_write_until_its_step_is_back() -> None:
    """The lender may give way to a higher class in the very round that its fork was admitted in."""
    driver = Driver(make_config())
    state = State(driver.config)
    [held] = state.pool.allocate(1)
    state.forks.copy(held, state.pool.allocate(1)[0])
    state.pool.release((held,))
    assert held not in state.pool.allocate(state.pool.num_available)
    copies = state.forks.take_copies()
    assert [source for source, _ in copies] == [held]
    assert state.pool.num_available == 0, "the step may have to run again"
    state.forks.copied(copies)
    assert state.pool.num_free == 1
    state.pool.check()


def test_copies_for_a_fork_that_gives_its_blocks_back_before_the_plan_are_dropped() -> None:
    pool = Driver().scheduler.pool
    forks = Forks(pool)
    source, kept, dropped = pool.allocate(3)
    forks.copy(source, kept)
    forks.copy(source, dropped)
    forks.cancel_copies((dropped,))
    assert forks.take_copies() == ((source, kept),)
    forks.copied(((source, kept),))
    pool.release((source, kept, dropped))
    pool.check()
    assert pool.num_held == 0


def test_a_fork_is_found_by_later_requests_as_any_other_is() -> None:
    driver = Driver()
    driver.add(*choices(2, max_tokens=8))
    driver.run()
    longer = PROMPT + driver.output("c1")
    driver.add(make_spec("later", longer, 2))
    assert driver.step().rows[0].num_computed_tokens == 16


@pytest.mark.parametrize(
    "changes", [{"prompt": PROMPT[:-1]}, {"tenant": "b"}, {"service_class": ServiceClass.BATCH}]
)
def test_a_group_has_one_prompt_one_tenant_and_one_class(changes: dict[str, Any]) -> None:
    driver = Driver()
    driver.add(*choices(1))
    other = make_spec("c1", **{"prompt": PROMPT, "fork_group": "job", **changes})
    with pytest.raises(AssertionError, match="c1 forks"):
        driver.scheduler.add(other, 0.0)
    run_to_end(driver, 1)


def test_a_group_s_name_may_come_again_with_another_prompt() -> None:
    driver = Driver()
    driver.add(*choices(2))
    driver.step()
    for i in range(2):
        driver.scheduler.finish(f"c{i}", CANCELLED, driver.now_s)
    driver.collect()
    driver.forget_updates()
    driver.add(*choices(2, range(7)))
    driver.run()
    assert driver.output("c1") == undisturbed_output(range(7), 6)
