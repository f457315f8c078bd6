"""transformers as a baseline: the same model, and outputs of exactly the requested lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaForCausalLM, PreTrainedModel

from kernels.model_config import ModelConfig, RopeScaling
from kernels.tools.baseline import (
    BaselineFailure,
    BaselineOptions,
    BaselineRun,
    run_baselines,
    run_baselines_apart,
)
from kernels.tools.baseline_model import config_fields, load_baseline_model
from kernels.weights.source import ModelSource, resolve_model
from tests.kernels.gguf_writing import write_gguf
from tests.kernels.tiny import make_model, save

NAMES = ["transformers_naive", "transformers_static_16", "transformers_continuous"]
OPTIONS = BaselineOptions(
    dtype="float32", device="cpu", num_threads=None, naive_limit=16, max_concurrent=64, cpu_batch_tokens=512
)
REQUESTS = [(range(3 + number, 9 + 5 * number), 3 + number % 4) for number in range(18)]


@pytest.fixture
def folder(tmp_path: Path) -> ModelSource:
    return resolve_model(str(save(make_model("llama"), tmp_path / "llama")))


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> torch.Tensor:
    tokens: torch.Tensor = model(torch.arange(3, 73)[None]).logits
    return tokens


@pytest.mark.parametrize(
    ("family", "arch"),
    [("llama_tied", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3_rope", "gemma3")],
)
def test_gguf_becomes_the_model_that_it_was_written_from(family: str, arch: str, tmp_path: Path) -> None:
    model: Any = make_model(family)
    if arch == "gemma3":
        # GGUF has no place for the attention scale.
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    path = write_gguf(model, tmp_path / "m.gguf", arch, matrices=GGMLQuantizationType.F32)

    loaded = load_baseline_model(resolve_model(str(path)), torch.float32, torch.device("cpu"))

    torch.testing.assert_close(_logits(loaded), _logits(model), rtol=1e-3, atol=1e-3)


def test_scaled_rotary_and_windows_reach_the_config() -> None:
    config = ModelConfig(
        "llama", 2, 8, 16, 2, 1, 4, 32, 64, 1e-5, 500.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16), layer_windows=(24, 24),
    )  # fmt: skip

    fields = config_fields(config)

    assert fields["rope_parameters"] == {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    assert (fields["model_type"], fields["sliding_window"]) == ("mistral", 24)


@pytest.mark.slow
def test_all_ways_generate_what_was_asked_for_whatever_the_end_of_sequence(folder: ModelSource) -> None:
    """Each way fails on an output of another length, so figures mean that lengths were right."""
    started: list[str] = []

    outcomes = run_baselines_apart(folder, REQUESTS, replace(OPTIONS, naive_limit=2), started.append)

    assert started == list(outcomes) == NAMES
    counts = []
    for outcome in outcomes.values():
        assert isinstance(outcome, BaselineRun), outcome
        assert outcome.output_tokens_per_s > 0
        counts.append((outcome.requests, outcome.output_tokens))
    whole = (18, sum(max_tokens for _, max_tokens in REQUESTS))
    assert counts == [(2, 3 + 4), whole, whole]


@pytest.mark.slow
def test_way_that_fails_says_so_and_leaves_the_others(
    folder: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise ValueError("no such thing here")

    monkeypatch.setattr(LlamaForCausalLM, "init_continuous_batching", refuse)

    outcomes = dict(run_baselines(folder, REQUESTS[:1], OPTIONS))

    assert outcomes["transformers_continuous"] == BaselineFailure("ValueError: no such thing here")
    assert [isinstance(outcome, BaselineRun) for outcome in outcomes.values()] == [True, True, False]


def test_model_that_transformers_cannot_load_fails_every_way(folder: ModelSource) -> None:
    (folder.path / "model.safetensors").write_bytes(b"damaged")

    outcomes = dict(run_baselines(folder, REQUESTS[:1], replace(OPTIONS, dtype="bfloat16")))

    assert list(outcomes) == NAMES
    assert all(isinstance(outcome, BaselineFailure) and outcome.error for outcome in outcomes.values())


def test_process_that_dies_counts_as_failed() -> None:
    outcomes = run_baselines_apart(None, REQUESTS[:1], None)  # type: ignore[arg-type]  # what kills it

    assert outcomes == dict.fromkeys(NAMES, BaselineFailure("its process ended with exit code 1"))
