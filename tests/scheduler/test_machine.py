"""Any sequence of arrivals, steps, failures and cancellations keeps the books, the slots and the outputs right."""

from collections.abc import Callable

import pytest
from hypothesis.stateful import run_state_machine_as_test

from scheduler.spec import FinishReason
from tests.scheduler.controls import (
    forgets_the_waiting,
    frees_blocks_still_being_written,
    hashes_without_parent,
    ignores_max_tokens,
    never_preempts,
    never_releases,
    plans_past_max_tokens,
    preempts_what_is_in_flight,
    preempts_without_recomputing,
    publishes_before_it_is_computed,
)
from tests.scheduler.machine import CONTROL, LookaheadMachine, SchedulerMachine, run_until_seen

EVERYTHING = {"preemptions", "prefix_hits", "errors", *FinishReason}


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [(SchedulerMachine, EVERYTHING), (LookaheadMachine, EVERYTHING | {"pending", "wasted"})],
    ids=["plain", "lookahead"],
)
def test_any_sequence_of_events_keeps_books_slots_and_outputs_right(
    machine: type[SchedulerMachine], wanted: set[str]
) -> None:
    run_until_seen(machine, machine.quick, wanted)


LOOKAHEAD_SABOTAGES = [plans_past_max_tokens, frees_blocks_still_being_written, preempts_what_is_in_flight]


@pytest.mark.parametrize("sabotage", LOOKAHEAD_SABOTAGES)
def test_control_each_mechanism_of_lookahead_switched_off_is_noticed(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(LookaheadMachine, settings=CONTROL)


@pytest.mark.parametrize(
    "sabotage",
    [
        never_releases,
        hashes_without_parent,
        publishes_before_it_is_computed,
        preempts_without_recomputing,
        ignores_max_tokens,
        never_preempts,
        forgets_the_waiting,
    ],
)
def test_control_each_mechanism_switched_off_is_noticed(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(SchedulerMachine, settings=CONTROL)
