"""Benches of the model alone, and beside transformers."""

import json
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.kernels.tiny import make_model, save
from tests.service.cli.conftest import ROOT, clean_env, command

LENGTHS = ((20, 3), (7, 6), (33, 2))


def _run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("bench", *arguments),
        env=clean_env(**env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save(make_model("llama"), tmp_path / "tiny")
    letters = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]  # the last two: space and new line
    vocab = {letter: token_id for token_id, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(
        json.dumps([{"prompt_tokens": prompt, "max_tokens": length} for prompt, length in LENGTHS])
    )
    return path


def test_decode_times_each_batch_size_at_the_context_asked_for() -> None:
    """Batches beyond TAILRACE_MAX_NUM_SEQS are measured too: what the model could do is the question."""
    ended = _run(
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
    ended = _run(
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
def test_decode_refuses_batches_out_of_range(batch: str) -> None:
    ended = _run("decode", "--batch", batch or " ", TAILRACE_ENGINE="deterministic")
    assert ended.returncode == 2
    assert ended.stderr.startswith("tailrace: --batch")
    assert len(ended.stderr.splitlines()) == 1


def test_context_that_the_pool_cannot_hold_is_one_clear_line() -> None:
    ended = _run(
        "decode", "--batch", "64", "--context", "3000",
        TAILRACE_ENGINE="deterministic", TAILRACE_KV_CACHE_BYTES="16777216",
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == (
        "tailrace: 64 × 3000 tokens need 6016 blocks and a model length of 3000; there are 128 blocks and 4096 "
        "tokens: raise TAILRACE_KV_CACHE_BYTES or TAILRACE_MAX_MODEL_LEN\n"
    )


def test_gpu_without_a_device_says_so() -> None:
    ended = _run("gpu", "--json", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("tailrace: bench gpu needs a CUDA device")
    assert len(ended.stderr.splitlines()) == 1


def test_quantization_option_wins_over_the_setting(model: Path) -> None:
    ended = _run(
        "decode", "--batch", "2", "--context", "9", "--quantization", "int8", "--json",
        TAILRACE_MODEL=str(model), TAILRACE_DEVICE="cpu", TAILRACE_QUANTIZATION="none",
        TAILRACE_DTYPE="float32", TAILRACE_KV_CACHE_BYTES="1048576",
    )  # fmt: skip
    report = json.loads(ended.stdout)
    assert (report["model"], report["dtype"], report["quantization"]) == (str(model), "float32", "int8")


def test_baseline_runs_the_same_requests_and_gives_ratios(model: Path, workload: Path) -> None:
    ended = _run(
        "offline", "--workload", str(workload), "--baseline", "transformers", "--baseline-limit", "2", "--json",
        TAILRACE_MODEL=str(model), TAILRACE_DEVICE="cpu", TAILRACE_DTYPE="float32",
        TAILRACE_KV_CACHE_BYTES="1048576", TAILRACE_MAX_NUM_SEQS="8",
    )  # fmt: skip
    report = json.loads(ended.stdout)
    names = ["transformers_naive", "transformers_static_16", "transformers_continuous"]
    assert list(report["baselines"]) == list(report["ratios"]) == names
    counts = [(each["requests"], each["output_tokens"]) for each in report["baselines"].values()]
    ours = report["runs"]["continuous"]
    assert counts == [(2, 3 + 6), (3, 11), (3, 11)]
    assert (ours["requests"], ours["output_tokens"]) == (3, 11)
    for name in names:
        theirs = report["baselines"][name]["output_tokens_per_s"]
        assert report["ratios"][name] == pytest.approx(ours["output_tokens_per_s"] / theirs, abs=0.01)
    assert ended.stderr.splitlines() == [f"{name} …" for name in names]


def test_baseline_needs_a_model(workload: Path) -> None:
    ended = _run(
        "offline", "--workload", str(workload), "--baseline", "transformers", TAILRACE_ENGINE="deterministic"
    )
    assert ended.returncode == 2
    assert ended.stderr == "tailrace: --baseline needs a model; TAILRACE_ENGINE is deterministic\n"
