"""A step begins while the one before is in flight: the same tokens as one at a time, through the product's scheduler.

Interpreted kernels are never late. LateEvents keeps the host from knowing a token before it has waited for it, so that
the device's part cannot depend on it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

import pytest
import torch
from llguidance import LLMatcher

from kernels.models.gpu import decoder
from kernels.models.gpu.decoder import GpuDecoderModel
from kernels.ops.embed_tokens.gpu import embed_tokens
from kernels.runner import PendingStep
from kernels.runtime.gpu import decode_graphs
from kernels.runtime.gpu.copies import Copies
from kernels.sampling.gpu.sampler import GpuSampler
from kernels.sampling.gpu.sampling_results import SamplingResults
from scheduler.plan import StepPlan
from scheduler.spec import FinishReason, RequestSpec
from tests.kernels.runtime.gpu.late import LateEvents
from tests.kernels.runtime.gpu.serving import (
    CPU,
    GREEDY,
    MIXED,
    PENALIZED,
    TOKENS,
    Piped,
    Served,
    assert_same,
    make_runner,
    serve,
    specs_of,
)


@pytest.fixture(autouse=True)
def _short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_CONTEXT_TOKENS", 64)


def check_same(
    device: torch.device, copies: Copies | None, specs: Sequence[RequestSpec]
) -> dict[str, Served]:
    one_at_a_time = serve(make_runner(device)[0], specs, 0)
    assert_same(serve(make_runner(device, copies)[0], specs, 1), one_at_a_time)
    return one_at_a_time


@cache
def one_at_a_time() -> dict[str, Served]:
    return serve(make_runner(CPU)[0], specs_of(MIXED), 0)


def test_tokens_logprobs_and_reasons_are_those_of_one_step_at_a_time() -> None:
    """Greedy and seeded, with and without penalties; one more request than slots."""
    served = serve(make_runner(CPU, LateEvents())[0], specs_of(MIXED), 1)
    assert_same(served, one_at_a_time())
    assert {each.finish for each in served.values()} == {FinishReason.LENGTH}
    assert len(served["r1"].logprobs) == len(served["r1"].tokens)


def test_a_request_that_ends_by_stop_id_while_its_next_step_is_out() -> None:
    """What a request sampled after its end does not count and does not affect other rows."""
    expected = dict(one_at_a_time())
    stops = [expected["r0"].tokens[2], None, expected["r2"].tokens[1]]
    for request_id, stop in (("r0", stops[0]), ("r2", stops[2])):
        tokens = expected[request_id].tokens
        kept = tokens[: tokens.index(stop) + 1]
        assert len(kept) < len(tokens) - 1
        expected[request_id] = Served(kept, (), FinishReason.STOP)
    assert_same(serve(make_runner(CPU, LateEvents())[0], specs_of(MIXED, stops), 1), expected)


def test_a_grammar_is_followed_token_by_token() -> None:
    constrained = replace(GREEDY, grammar=LLMatcher.grammar_from_regex("[a-c]{3}x?"))
    served = check_same(CPU, LateEvents(), specs_of([GREEDY, constrained, PENALIZED], [None, 0, None]))
    text = b"".join(TOKENS[token] for token in served["r1"].tokens)
    assert re.fullmatch(rb"[a-c]{3}x?", text)
    assert served["r1"].finish is FinishReason.STOP


def test_control_without_the_tokens_that_stayed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending tokens read as token 0 must change the output, or nothing above was pending."""
    specs = specs_of(MIXED[:1])

    def forgetful(token_ids: torch.Tensor, *rest: torch.Tensor, scale: float | None) -> torch.Tensor:
        return embed_tokens(token_ids.clamp(min=0), *rest, scale=scale)

    monkeypatch.setattr(decoder, "embed_tokens", forgetful)
    actual = serve(make_runner(CPU, LateEvents())[0], specs, 1)
    assert actual["r0"].tokens != one_at_a_time()["r0"].tokens


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call_idx: int) -> None:
    """The call with this number raises after it has done its work."""
    calls = count()
    method = getattr(owner, name)

    def failing(*args: object) -> object:
        result = method(*args)
        if next(calls) == call_idx:
            raise RuntimeError(f"{name} fails once")
        return result

    monkeypatch.setattr(owner, name, failing)


REPEATED = specs_of((PENALIZED, MIXED[2], PENALIZED))


@cache
def undisturbed() -> dict[str, Served]:
    return serve(make_runner(CPU)[0], REPEATED, 0)


@pytest.mark.parametrize(
    ("owner", "name", "call_idx"),
    [
        (SamplingResults, "wait", 2),
        pytest.param(SamplingResults, "wait", 3, marks=pytest.mark.slow),
        pytest.param(GpuSampler, "start", 3, marks=pytest.mark.slow),
        (GpuDecoderModel, "forward", 4),
    ],
)
def test_hazard_a_failed_step_and_the_one_behind_it_run_again_on_what_they_had(
    owner: type, name: str, call_idx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, with penalties: no token is counted twice, none is read that a later step has sampled."""
    runner, _ = make_runner(CPU, LateEvents())
    expected = undisturbed()
    fail_once(monkeypatch, owner, name, call_idx)
    assert_same(serve(runner, REPEATED, 1, Piped(runner).begin), expected)


@dataclass
class Begun:
    """What one `begin` needed, and whether its rows were pending."""

    num_uploads: int
    num_waits: int
    num_pending: int
    has_grammar: bool


def observe(specs: Sequence[RequestSpec], monkeypatch: pytest.MonkeyPatch) -> list[Begun]:
    copies = LateEvents()
    runner, inputs = make_runner(CPU, copies)
    begin = runner.begin
    begun: list[Begun] = []

    def observed(plan: StepPlan) -> PendingStep:
        num_uploads, num_waits = inputs.staging.num_uploads, copies.num_waits
        step = begin(plan)
        begun.append(
            Begun(
                inputs.staging.num_uploads - num_uploads,
                copies.num_waits - num_waits,
                sum(row.is_pending for row in plan.rows),
                any(row.sampling is not None and row.sampling.grammar is not None for row in plan.rows),
            )
        )
        return step

    monkeypatch.setattr(runner, "begin", observed)
    serve(runner, specs, 1)
    return begun


def test_a_step_takes_one_copy_up_and_its_beginning_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks, mixed steps and graphs' buckets, penalties with their histories, biases, log-probabilities."""
    biased = replace(GREEDY, logit_bias=tuple((token_id, 1.0) for token_id in range(20)))
    begun = observe(specs_of([*MIXED[:3], biased]), monkeypatch)
    assert sum(step.num_pending for step in begun) > 10
    assert {(step.num_uploads, step.num_waits) for step in begun} == {(1, 0)}


def test_masks_take_a_second_copy_and_wait_for_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    constrained = replace(GREEDY, grammar=LLMatcher.grammar_from_regex("[a-c]x?"))
    begun = observe(specs_of([GREEDY, constrained], [None, 0]), monkeypatch)
    for step in begun:
        assert step.num_uploads <= 1 + step.has_grammar
        assert step.num_waits <= step.has_grammar
    assert any(step.num_uploads == 2 and step.num_waits == 1 for step in begun)
    assert any(step.num_pending and not step.has_grammar for step in begun)


@pytest.mark.gpu
def test_compiled_lookahead_equals_one_step_at_a_time(cuda_device: torch.device) -> None:
    """Graph replays with pending tokens, on a device that really runs later than the host."""
    free = serve(make_runner(cuda_device)[0], specs_of(MIXED, max_tokens=30), 0)
    check_same(cuda_device, None, specs_of(MIXED, [free["r0"].tokens[9]], max_tokens=30))
