"""The real Scheduler over a pool so small that requests are preempted: every runner still generates the same tokens."""

from collections.abc import Callable

import pytest

from kernels.deterministic import DeterministicRunner, expected_tokens
from kernels.loading import load_runner
from kernels.runner import Runner
from kernels.runtime.model_runner import ModelRunner
from scheduler.plan import SamplingParams
from scheduler.spec import FinishReason, RequestSpec
from tests.kernels.driving import generate, scheduler_for, updates_of
from tests.kernels.tiny import make_model, save
from tests.support.configs import deterministic_options, runner_options

MAX_NUM_SEQS, MAX_TOKENS = 6, 40
PROMPTS = [tuple(range(30, 30 + length)) for length in (3, 20, 20, 47, 9, 33, 16, 64, 50, 1)]
SAMPLING = [
    SamplingParams(seed=idx, temperature=0.8 * (idx % 2), frequency_penalty=0.2 * (idx % 3))
    for idx in range(len(PROMPTS))
]


def run(runner: Runner, num_lookahead_steps: int) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how often one was preempted."""
    scheduler = scheduler_for(
        runner,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=48,
        num_lookahead_steps=num_lookahead_steps,
    )
    tokens: dict[str, list[int]] = {str(idx): [] for idx in range(len(PROMPTS))}
    for idx, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        spec = RequestSpec(str(idx), prompt, MAX_TOKENS, sampling, arrival_s=0.0)
        assert scheduler.add(spec, 0.0) is None
    ends = []
    for update in updates_of(scheduler, runner):
        tokens[update.request_id].extend(update.new_token_ids)
        ends.extend([update.finish] if update.finish else [])
    stats = scheduler.stats()
    assert ends == [FinishReason.LENGTH] * len(PROMPTS)
    assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == stats.total_blocks
    return tokens, stats.num_preemptions


LOOKAHEAD = pytest.mark.parametrize("num_lookahead_steps", [0, 1])


@LOOKAHEAD
def test_deterministic_runner(num_lookahead_steps: int) -> None:
    runner = DeterministicRunner(deterministic_options(num_blocks=16, block_size=16))

    tokens, num_preemptions = run(runner, num_lookahead_steps)

    assert num_preemptions > 0
    assert tokens == {
        str(idx): list(expected_tokens(prompt, MAX_TOKENS)) for idx, prompt in enumerate(PROMPTS)
    }


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ModelRunner]:
    folder = save(make_model("llama"), tmp_path_factory.mktemp("llama"))
    block_bytes = 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, head size, tokens, float32

    def load_with(num_blocks: int) -> ModelRunner:
        options = runner_options(
            str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_bytes=num_blocks * block_bytes,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=48,
            num_threads=1,
        )
        return load_runner(options)

    return load_with


@LOOKAHEAD
def test_model_runner_with_seeds_and_penalties(
    load: Callable[[int], ModelRunner], num_lookahead_steps: int
) -> None:
    tokens, num_preemptions = run(load(16), num_lookahead_steps)

    assert num_preemptions > 0
    roomy = load(64)
    for idx, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        (alone,) = generate(roomy, [prompt], MAX_TOKENS, sampling, chunk_tokens=48)
        assert tokens[str(idx)] == alone.tokens, idx
