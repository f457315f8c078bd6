"""Credit hysteresis and the progress watchdog, without a broker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from service.ingest.backpressure import CreditGate, ProgressWatchdog
from tests.support.configs import kafka_config

P0, P1 = ("jobs", 0), ("jobs", 1)


def test_hazard_wide_hysteresis_does_not_resume_for_a_single_credit() -> None:
    gate = CreditGate(resume_credit=8)
    assert gate.update(32, 0)
    assert not gate.update(0, 32)
    assert not gate.update(7, 25)
    assert gate.update(8, 24)
    assert gate.update(1, 31), "open stays open until credit is gone"
    assert gate.num_closings == 1


def test_a_small_worker_resumes_at_half_of_its_largest_credit() -> None:
    gate = CreditGate(resume_credit=8)
    gate.update(2, 0)
    gate.update(0, 2)
    assert gate.update(1, 1)


@given(st.integers(1, 50), st.lists(st.integers(0, 40), max_size=40))
def test_gate_never_stays_shut_with_credit_and_nothing_in_flight(
    resume: int, credits_seen: list[int]
) -> None:
    gate = CreditGate(resume)
    for credit in credits_seen:
        gate.update(credit, 5)
    assert gate.update(1, 0)


class TestWatchdog:
    def setup_method(self) -> None:
        self.watchdog = ProgressWatchdog(stall_timeout_s=10)

    def observe(self, now_s: float, position: int, end: int = 9) -> object:
        return self.watchdog.observe(now_s, {P0: position}, {P0: end}, [P0])

    def test_hazard_fetching_that_ends_silently_is_found(self) -> None:
        self.observe(0, 3)
        self.watchdog.empty_poll([P0])
        assert self.observe(9.9, 3) is None
        assert self.observe(10, 3) == P0

    def test_progress_restarts_the_clock(self) -> None:
        self.observe(0, 3)
        self.watchdog.empty_poll([P0])
        self.observe(9, 4)
        assert self.observe(11, 4) is None

    def test_caught_up_is_no_stall(self) -> None:
        self.observe(0, 9)
        self.watchdog.empty_poll([P0])
        assert self.observe(100, 9) is None

    def test_waiting_for_another_partition_is_no_stall(self) -> None:
        self.observe(0, 3)
        self.watchdog.empty_poll([P1])
        assert self.observe(100, 3) is None

    def test_paused_is_no_stall(self) -> None:
        self.observe(0, 3)
        self.watchdog.empty_poll([P0])
        assert self.watchdog.observe(100, {P0: 3}, {P0: 9}, []) is None
        assert self.observe(101, 3) is None, "resuming starts the clock anew"


def test_hazard_defaults_are_not_those_of_aiokafka() -> None:
    config = kafka_config()
    assert config.session_timeout_s == 45
    assert config.rebalance_timeout_s == 30


def test_bad_settings_name_field_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"heartbeat_interval_s is 3: it may be at most half .*\(5\)"):
        kafka_config(session_timeout_s=5)
    with pytest.raises(ValueError, match="max_poll_records is 0: it must be at least 1"):
        kafka_config(max_poll_records=0)


def test_password_is_not_shown() -> None:
    assert "hunter2" not in repr(kafka_config(kafka_sasl_password=SecretStr("hunter2")))
