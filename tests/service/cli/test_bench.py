"""Benches of the model alone, and compared with transformers."""

import json
from pathlib import Path

import pytest

from service.cli.bench_offline import with_slots
from service.cli.bench_report import note_spread, spread
from service.settings import load_settings
from tests.service.cli.bench_support import run_bench, save_tiny_model
from tests.service.cli.conftest import Tailrace

KNOWN_SHAPES = "nor one of long-prompts, long-answers, lone-stream, short-jobs, typical"
LENGTHS = ((20, 3), (7, 6), (33, 2))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(
        json.dumps([{"prompt_tokens": prompt, "max_tokens": length} for prompt, length in LENGTHS])
    )
    return path


def test_decode_times_each_batch_size_at_the_context_asked_for() -> None:
    """Batches beyond TAILRACE_MAX_NUM_SEQS are measured too: what the model could do is the question."""
    ended = run_bench(
        "decode", "--batch", "1,3", "--context", "70", "--json",
        TAILRACE_ENGINE="deterministic", TAILRACE_DETERMINISTIC_STEP_MS="2", TAILRACE_MAX_NUM_SEQS="2",
        TAILRACE_MAX_NUM_BATCHED_TOKENS="16",
    )  # fmt: skip
    lines = json.loads(ended.stdout)["decode"]
    assert [(line["batch"], line["context_tokens"]) for line in lines] == [(1, 70), (3, 70)]
    for line in lines:
        assert 2 <= line["best_step_ms"] <= line["median_step_ms"]
        assert line["output_tokens_per_s"] == pytest.approx(
            line["batch"] * 1000 / line["median_step_ms"], rel=1e-3
        )


def test_prefill_gives_milliseconds_of_a_step_and_tokens_per_second() -> None:
    ended = run_bench(
        "prefill", "--prompts", "2", "--prompt-tokens", "70", "--json",
        TAILRACE_ENGINE="deterministic", TAILRACE_DETERMINISTIC_STEP_MS="2", TAILRACE_MAX_NUM_SEQS="2",
        TAILRACE_MAX_NUM_BATCHED_TOKENS="32",
    )  # fmt: skip
    line = json.loads(ended.stdout)["prefill"]
    assert (line["num_prompts"], line["prompt_tokens"], line["chunk_tokens"]) == (2, 70, 32)
    assert line["median_step_ms"] >= 2
    num_steps = 2 * 3
    assert line["median_step_ms"] * num_steps == pytest.approx(line["median_s"] * 1000, rel=0.01)
    assert line["prompt_tokens_per_s"] == pytest.approx(2 * 70 / line["median_s"], rel=0.01)


@pytest.mark.parametrize("batch", ["", "0", "1,x", "5000", ",".join("1" * 40)])
def test_decode_refuses_batches_out_of_range(batch: str, in_process: Tailrace) -> None:
    ended = in_process("bench", "decode", "--batch", batch or " ", TAILRACE_ENGINE="deterministic")
    assert ended.returncode == 2
    assert ended.stderr.startswith("tailrace: --batch")
    assert len(ended.stderr.splitlines()) == 1


def test_context_that_the_pool_cannot_hold_is_one_clear_line() -> None:
    ended = run_bench(
        "decode", "--batch", "64", "--context", "3000",
        TAILRACE_ENGINE="deterministic", TAILRACE_KV_CACHE_BYTES="16777216",
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == (
        "tailrace: 64 × 3000 tokens need 6016 blocks and a model length of 3000; there are 128 blocks and 4096 "
        "tokens: raise TAILRACE_KV_CACHE_BYTES or TAILRACE_MAX_MODEL_LEN\n"
    )


def test_gpu_without_a_device_says_so() -> None:
    ended = run_bench("gpu", "--json", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("tailrace: bench gpu needs a CUDA device")
    assert len(ended.stderr.splitlines()) == 1


def test_quantization_option_wins_over_the_setting(model: Path) -> None:
    ended = run_bench(
        "decode", "--batch", "2", "--context", "9", "--quantization", "int8", "--json",
        TAILRACE_MODEL=str(model), TAILRACE_DEVICE="cpu", TAILRACE_QUANTIZATION="none",
        TAILRACE_DTYPE="float32", TAILRACE_KV_CACHE_BYTES="1048576",
    )  # fmt: skip
    report = json.loads(ended.stdout)
    assert (report["model"], report["dtype"], report["quantization"]) == (str(model), "float32", "int8")


@pytest.mark.slow
def test_baseline_runs_the_same_requests_and_gives_ratios(model: Path, workload: Path) -> None:
    ended = run_bench(
        "offline", "--workload", str(workload), "--baseline", "transformers", "--baseline-limit", "2", "--json",
        TAILRACE_MODEL=str(model), TAILRACE_DEVICE="cpu", TAILRACE_DTYPE="float32",
        TAILRACE_KV_CACHE_BYTES="1048576", TAILRACE_MAX_NUM_SEQS="8",
    )  # fmt: skip
    report = json.loads(ended.stdout)
    names = ["transformers_naive", "transformers_static_16", "transformers_continuous"]
    assert list(report["baselines"]) == list(report["ratios"]) == names
    counts = [(each["requests"], each["output_tokens"]) for each in report["baselines"].values()]
    assert counts == [(2, 3 + 6), (3, 11), (3, 11)]
    assert list(report["runs"]) == ["continuous", "continuous_again"], "before and after the baselines"
    ours = list(report["runs"].values())
    assert [(run["requests"], run["output_tokens"]) for run in ours] == [(3, 11)] * 2
    slow, fast = sorted(run["output_tokens_per_s"] for run in ours)
    assert report["spread"] == pytest.approx(fast / slow - 1, abs=1e-3)
    for name in names:
        theirs = report["baselines"][name]["output_tokens_per_s"]
        assert report["ratios"][name] == pytest.approx((slow + fast) / 2 / theirs, abs=0.01)
    assert ended.stderr.splitlines() == [*(f"{name} …" for name in names), "continuous again …"]


def test_baseline_needs_a_model(workload: Path, in_process: Tailrace) -> None:
    ended = in_process(
        "bench",
        "offline",
        "--workload",
        str(workload),
        "--baseline",
        "transformers",
        TAILRACE_ENGINE="deterministic",
    )
    assert ended.returncode == 2
    assert ended.stderr == "tailrace: --baseline needs a model; TAILRACE_ENGINE is deterministic\n"


FAST = {"TAILRACE_ENGINE": "deterministic", "TAILRACE_DETERMINISTIC_STEP_MS": "0.1"}


def test_shapes_run_one_after_the_other_and_give_both_rates() -> None:
    ended = run_bench("offline", "--shape", "typical, 3:5:2", "--limit", "4", "--json", **FAST)
    report = json.loads(ended.stdout)
    names = ["long-prompts", "long-answers", "lone-stream", "short-jobs", "3:5:2"]
    assert list(report["runs"]) == names
    assert report["workload"] == ", ".join(names)
    counts = [
        (run["requests"], run["prompt_tokens"], run["output_tokens"]) for run in report["runs"].values()
    ]
    assert counts == [(4, 4096, 64), (4, 64, 1024), (1, 64, 256), (4, 256, 64), (2, 6, 10)]
    for run in report["runs"].values():
        rates = [run[f"{what}_tokens_per_s"] / run[f"{what}_tokens"] for what in ("prompt", "output")]
        assert rates[0] == pytest.approx(rates[1], rel=1e-3), "both over the same time"
        assert (run["failed"], run["cached_prompt_tokens"]) == (0, 0)
        assert run["ttft_s"]["p50"] > 0
        assert run["tpot_s"]["p50"] > 0


def test_more_slots_than_the_token_budget_raise_the_budget(in_process: Tailrace) -> None:
    environ = FAST | {"TAILRACE_MAX_NUM_SEQS": "8", "TAILRACE_MAX_NUM_BATCHED_TOKENS": "16"}
    ended = in_process("bench", "offline", "--shape", "1:3:40", "--slots", "20", "--json", **environ)
    report = json.loads(ended.stdout)
    assert (report["slots"], report["runs"]["continuous"]["requests"]) == (20, 40)


@pytest.mark.parametrize(("slots", "budget"), [(600, 600), (8, 512)])
def test_slots_leave_a_budget_that_suffices(slots: int, budget: int) -> None:
    settings = with_slots(load_settings({}), slots)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (slots, budget)


def test_shapes_and_policies_make_a_run_each_and_a_table() -> None:
    ended = run_bench("offline", "--shape", "4:3:2,2:2:1", "--policy", "continuous,static", **FAST)
    head, *rows = [line.split("\t") for line in ended.stdout.splitlines()]
    assert head[:4] == ["run", "requests", "prompt tok/s", "output tok/s"]
    assert [row[:2] for row in rows] == [
        ["4:3:2 continuous", "2"], ["4:3:2 static", "2"], ["2:2:1 continuous", "1"], ["2:2:1 static", "1"],
    ]  # fmt: skip
    assert all(len(row) == len(head) for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --workload FILE, or --shape such as 1024:16:16, or --shape typical"),
        (("--shape", "1:1:1", "--workload", "w"), "--workload and --shape are two ways to say the same; give one"),
        (
            ("--shape", "long"),
            f"--shape: 'long' is neither PROMPT_TOKENS:OUTPUT_TOKENS:REQUESTS, such as 1024:16:16, {KNOWN_SHAPES}",
        ),
        (("--shape", "0:1:1"), "--shape 0:1:1: prompt tokens must be 1 to 1048576; it is 0"),
        (("--shape", "1:9999999999:1"), "--shape 1:9999999999:1: output tokens must be 1 to 1048576; it is 9999999999"),
        (("--shape", "1:1:20000"), "--shape 1:1:20000: requests must be 1 to 10000; it is 20000"),
        (("--shape", "1:2:3,1:2:3"), "--shape names '1:2:3' twice"),
        (
            ("--shape", "1000000:1:10000"),
            "--shape 1000000:1:10000: 10000000000 prompt tokens in all; the limit is 4194304",
        ),
        (
            ("--shape", ",".join(f"{length}:1:1" for length in range(1, 18))),
            "--shape names 17 shapes; the limit is 16",
        ),
        (
            ("--shape", "typical", "--baseline", "transformers"),
            "--baseline takes one workload at a time; --shape names 4",
        ),
    ],
)  # fmt: skip
def test_workloads_that_cannot_be_run_are_refused(
    arguments: tuple[str, ...], message: str, in_process: Tailrace
) -> None:
    ended = in_process("bench", "offline", *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"tailrace: {message}\n")


def test_request_that_never_fits_is_one_clear_line() -> None:
    ended = run_bench("offline", "--shape", "3000:1:1", **FAST, TAILRACE_KV_CACHE_BYTES="4194304")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("tailrace: workload request 0: ")
    assert len(ended.stderr.splitlines()) == 1


def test_disturbed_runs_are_distinguished_from_calm_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert spread([100.0, 109.0]) == pytest.approx(0.09)
    note_spread("the engine", [100.0, 109.0])
    assert capsys.readouterr().err == ""
    note_spread("the engine", [100.0, 80.0])
    assert capsys.readouterr().err == (
        "the engine gave 100.0, 80.0 tok/s in the same run: the machine was disturbed, run it again\n"
    )


def test_streaming_is_compared_in_turns(workload: Path) -> None:
    ended = run_bench(
        "service", "--workload", str(workload), "--compare-streaming", "--repeats", "2", "--json", **FAST
    )
    report = json.loads(ended.stdout)
    rates = report["output_tokens_per_s"]
    assert {name: len(each) for name, each in rates.items()} == {"streamed": 2, "results only": 2}
    assert all(value > 0 for each in report["loop_cpu_s"].values() for value in each)
    medians = {name: sum(each) / 2 for name, each in rates.items()}
    assert report["cost"] == pytest.approx(1 - medians["streamed"] / medians["results only"], abs=1e-3)
    turns = [line.split(":")[0] for line in ended.stderr.splitlines()]
    assert turns == ["1 of 2, results only", "1 of 2, streamed", "2 of 2, streamed", "2 of 2, results only"]
    assert report["requests"] == len(LENGTHS)
