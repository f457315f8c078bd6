"""Mechanisms switched off: a test that does not notice proves nothing."""

import pytest

from scheduler.admission import BlockNeed
from scheduler.blocks import BlockPool, chain_hash
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.spec import FinishReason
from scheduler.state import State


def never_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: None)


def hashes_without_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.request.chain_hash", lambda parent, token_ids: chain_hash(b"", token_ids))


def publishes_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = State.admit

    def admit_and_publish(self: State, request: Request, need: BlockNeed) -> None:
        admit(self, request, need)
        num_full = request.num_tokens // self.config.block_size
        hashes = request.hash_blocks(num_full, self.config.block_size)
        for block, name in zip(request.block_table[:num_full], hashes, strict=True):
            self.pool.publish(block, name)

    monkeypatch.setattr(State, "admit", admit_and_publish)


def preempts_without_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = State.admit

    def admit_as_computed(self: State, request: Request, need: BlockNeed) -> None:
        was_preempted = request.num_preemptions > 0
        admit(self, request, need)
        if was_preempted:
            request.num_computed_tokens = request.num_tokens - 1

    monkeypatch.setattr(State, "admit", admit_as_computed)


def ignores_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(self: Request) -> FinishReason | None:
        return FinishReason.LENGTH if len(self.generated) > self.spec.max_tokens else None

    monkeypatch.setattr(Request, "finish_reason", reason)


def never_preempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_grow", lambda self, decodes: None)


def forgets_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.admission.headroom_blocks", lambda *_: 1 << 20)


def plans_past_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "can_decode", property(lambda self: self.num_missing_tokens == 1))


def frees_blocks_still_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    end = State.end

    def end_and_free(self: State, request: Request, reason: FinishReason, error: str | None = None) -> None:
        table = request.block_table
        end(self, request, reason, error)
        if request.num_in_flight:
            request.block_table = ()
            self.pool.release(table)

    monkeypatch.setattr(State, "end", end_and_free)


def preempts_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "hold_back", lambda self, victims: False)
