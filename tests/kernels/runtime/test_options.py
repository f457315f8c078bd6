"""Options that the operator may set, and the errors for those that are not possible."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.errors import OptionsError
from kernels.loading import load_runner, pool_shape
from kernels.model_config import ModelConfig
from kernels.runtime.kv_pool import bytes_per_block
from kernels.runtime.model_runner import PoolShape
from tests.kernels.tiny import make_model, save
from tests.support.configs import runner_options

CONFIG = ModelConfig(
    model_type="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
BLOCK_BYTES = bytes_per_block(CONFIG, 16, torch.float32)


def shape_of(**fields: Any) -> PoolShape:
    return pool_shape(runner_options("m", **fields), CONFIG, torch.float32)


def test_bytes_become_whole_blocks() -> None:
    assert shape_of(kv_cache_bytes=10 * BLOCK_BYTES + 1) == PoolShape(10, 16, 160)


def test_requests_grow_as_long_as_model_and_pool_allow() -> None:
    assert shape_of(kv_cache_bytes=100 * BLOCK_BYTES).max_model_len == 512
    assert shape_of(kv_cache_bytes=100 * BLOCK_BYTES, max_model_len=77).max_model_len == 77


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_bytes": BLOCK_BYTES - 1}, f"one block of 16 tokens takes {BLOCK_BYTES}"),
        ({"max_model_len": 513}, "max_model_len is 513; the model takes at most 512"),
        (
            {"max_model_len": 33, "kv_cache_bytes": 2 * BLOCK_BYTES},
            rf"max_model_len is 33; .* holds 32 tokens \(needed: {3 * BLOCK_BYTES} bytes\)",
        ),
    ],
)
def test_pool_that_cannot_be_had_names_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        shape_of(**fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    with pytest.raises(OptionsError, match="device is cuda; torch finds no usable CUDA device"):
        load_runner(runner_options(str(folder), device="cuda"))


def test_float16_on_the_cpu_is_refused(folder: Path) -> None:
    with pytest.raises(OptionsError, match="dtype is float16; on the cpu use bfloat16, float32 or auto"):
        load_runner(runner_options(str(folder), device="cpu", dtype="float16"))


def test_block_size_that_the_pool_refuses_is_the_operators(folder: Path) -> None:
    with pytest.raises(OptionsError, match="block_size is 24"):
        load_runner(runner_options(str(folder), device="cpu", block_size=24))


@pytest.mark.parametrize(
    ("native", "compiled", "dtype"),
    [
        (True, True, torch.bfloat16),
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ],
)
def test_automatic_type_follows_the_processor(
    native: bool, compiled: bool, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = {"avx512_f": True, "avx512_bf16": native}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr("kernels.loading.cpu_kernels_supported", lambda **_: compiled)
    options = runner_options(str(folder), device="cpu", kv_cache_bytes=1 << 20, num_threads=1)

    runner = load_runner(options)

    assert runner.dtype == dtype
    assert runner.kv_cache_bytes <= 1 << 20
    assert runner.eos_token_ids == (2,)
    assert runner.config.model_type == "llama"
