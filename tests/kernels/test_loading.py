"""Messages for models and options that the GPU does not support."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import loading
from kernels.errors import OptionsError
from kernels.loading import load_on_gpu, missing_on_gpu
from kernels.model_config import ModelConfig
from kernels.runner import RunnerOptions
from kernels.weights.checkpoint import open_checkpoint
from kernels.weights.source import ModelFormat, ModelSource
from tests.kernels.tiny import make_model, save
from tests.support.configs import runner_options

CONFIG = ModelConfig("llama", 1, 32, 48, 2, 1, 16, 99, 128, 1e-6, 10000.0)
OPTIONS = runner_options("tiny", kv_cache_bytes=1 << 20, max_num_seqs=2)


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return ModelSource(save(make_model("llama"), tmp_path), ModelFormat.HUGGING_FACE, "tiny")


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (CONFIG, replace(OPTIONS, quantization="int8"), "quantization int8"),
        (replace(CONFIG, head_dim=512), OPTIONS, "head_dim is 512"),
        (replace(CONFIG, head_dim=33), OPTIONS, "head_dim is 33"),
        (CONFIG, replace(OPTIONS, block_size=24), "block_size is 24"),
    ],
)
def test_what_is_missing_is_named(config: ModelConfig, options: RunnerOptions, reason: str) -> None:
    assert str(missing_on_gpu(config, options)).startswith(reason)


def test_native_families_miss_nothing() -> None:
    for config in (
        CONFIG,
        replace(CONFIG, layer_windows=(512,), local_rope_theta=1e4, has_post_norms=True),
        replace(CONFIG, qk_norm=True),
    ):
        assert missing_on_gpu(config, OPTIONS) is None


def test_loading_refuses_what_has_no_path(source: ModelSource) -> None:
    checkpoint = open_checkpoint(source, torch.float32)
    with pytest.raises(OptionsError, match="cannot run on cpu: quantization int8 has no path there yet"):
        load_on_gpu(replace(OPTIONS, quantization="int8"), checkpoint, torch.float32, torch.device("cpu"))


def test_auto_takes_the_cpu_and_says_why_and_cuda_insists(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading.torch.cuda, "is_available", lambda: True)
    options = replace(OPTIONS, model=str(source.path), quantization="int8", dtype="float32")
    runner = loading.load_runner(options)
    assert not runner.prefers_lookahead
    assert "quantization int8 has no path there yet; the model runs on the cpu" in caplog.text
    with pytest.raises(OptionsError, match="device is cuda; quantization int8"):
        loading.load_runner(replace(options, device="cuda"))


def test_a_device_that_is_too_old_is_passed_over(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading.torch.cuda, "get_device_capability", lambda: (7, 5))
    options = replace(OPTIONS, model=str(source.path), dtype="float32")
    assert not loading.load_runner(options).prefers_lookahead
    assert "its compute capability is 7.5; the kernels need 8.0; the model runs on the cpu" in caplog.text
    with pytest.raises(OptionsError, match=r"device is cuda; its compute capability is 7\.5"):
        loading.load_runner(replace(options, device="cuda"))
