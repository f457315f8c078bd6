"""Norm, quantization, rotary and the write into the pool."""

import pytest
import torch

from kernels.model_config import ModelConfig, RopeScaling
from kernels.models.rope import RotaryTables
from kernels.ops.rms_norm.reference import rms_norm_reference
from kernels.ops.rotary.reference import rotary_reference
from kernels.ops.store_kv.reference import store_kv_reference
from ops.bench.cpu_calls import quantize
from tests.kernels.ops.cpu.cpu_calls import add_norm, rms_norm, rotate_and_store


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("size", [4, 33, 576])
def test_rms_norm(rows: int, size: int) -> None:
    x, weight = torch.randn(rows, size) * 30, torch.rand(size) + 0.5
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).float(), expected, atol=1e-5, rtol=5e-3)


def test_rms_norm_of_chosen_rows() -> None:
    x, index = torch.randn(9, 64), torch.tensor([8, 0, 3])
    weight = torch.ones(64)
    assert torch.equal(rms_norm(x, weight, 1e-5, index), rms_norm(x, weight, 1e-5)[index])


def test_rms_norm_keeps_nan_in_its_row() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    assert rms_norm(x, torch.ones(64), 1e-5).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("size", [4, 33, 640])
def test_add_norm(rows: int, size: int) -> None:
    x, branch = torch.randn(2, rows, size) * 30
    weights = torch.rand(size) + 0.5, torch.rand(size) + 0.5
    total = x + rms_norm_reference(branch, weights[0], 1e-6)
    got = add_norm(x, branch, weights, 1e-6)
    torch.testing.assert_close(got.float(), rms_norm_reference(total, weights[1], 1e-6), atol=1e-5, rtol=5e-3)
    torch.testing.assert_close(x, total, atol=1e-5, rtol=1e-6)


def test_add_norm_of_chosen_rows_leaves_the_sum_to_whoever_asks_again() -> None:
    x, branch, index = torch.randn(9, 64), torch.randn(9, 64), torch.tensor([8, 0, 3, 3])
    weights, before = (torch.rand(64), torch.rand(64)), x.clone()
    got = add_norm(x, branch, weights, 1e-6, index)
    assert torch.equal(x, before)
    assert torch.equal(got, add_norm(x, branch, weights, 1e-6)[index])


@pytest.mark.parametrize("place", [0, 1])
def test_add_norm_keeps_nan_in_its_row(place: int) -> None:
    both = torch.randn(2, 3, 64)
    both[place, 1, 5] = torch.nan
    got = add_norm(both[0], both[1], (torch.ones(64), torch.ones(64)), 1e-6)
    assert got.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(("size", "groups"), [(96, 1), (96, 3), (36, 1), (100, 5)])
def test_quantize_is_off_by_half_a_step_at_most(size: int, groups: int) -> None:
    x = (torch.randn(7, size) * torch.logspace(-3, 3, 7).unsqueeze(1)).bfloat16()
    codes, scales = quantize(x, groups)
    back = (codes.float() - 128).view(7, groups, -1) * scales.unsqueeze(2)
    step = scales.unsqueeze(2).expand_as(back)
    assert ((back - x.float().view_as(back)).abs() <= step * 0.501).all()
    assert codes.min() >= 1


def test_quantize_of_zeros_is_zero() -> None:
    codes, scales = quantize(torch.zeros(2, 32), 1)
    assert (codes == 128).all()
    assert scales.isfinite().all()


def _config(head_dim: int) -> ModelConfig:
    return ModelConfig("llama", 1, 64, 64, 4, 2, head_dim, 100, 512, 1e-5, 10000.0)


@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [19, 150])
def test_rotate_and_store(head_dim: int, block_size: int, with_norm: bool, num_tokens: int) -> None:
    num_heads, num_kv_heads, num_blocks = 4, 2, 12
    cos, sin = RotaryTables(_config(head_dim), 512).of(0)
    positions = torch.randint(0, 512, (num_tokens,))
    at = torch.arange(5, 5 + num_tokens)
    slots = torch.randperm(num_blocks)[at // block_size] * block_size + at % block_size
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = qkv.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    gains = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5)
    if with_norm:
        query, key = (rms_norm_reference(x, gain, 1e-6) for x, gain in zip((query, key), gains, strict=True))
    query, key = (rotary_reference(x, cos[positions], sin[positions]) for x in (query, key))
    keys = torch.full((num_blocks, num_kv_heads, head_dim // 2, block_size, 2), torch.nan).bfloat16()
    values = torch.full((num_blocks, num_kv_heads, block_size // 2, head_dim, 2), torch.nan).bfloat16()
    expected_keys, expected_values = keys.clone(), values.clone()
    store_kv_reference(key, value, expected_keys, expected_values, slots)
    got = rotate_and_store(
        qkv.clone(), num_heads, (cos, sin), positions, keys, values, slots, gains if with_norm else None, 1e-6
    )
    torch.testing.assert_close(got.float(), query, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(keys, expected_keys, atol=2e-2, rtol=1e-2, equal_nan=True)
    written = expected_values.isfinite()
    assert torch.equal(values[written], expected_values[written])


def test_store_clears_the_partner_that_a_freed_block_left_as_nan() -> None:
    keys, values = torch.full((1, 1, 8, 16, 2), torch.nan), torch.full((1, 1, 8, 16, 2), torch.nan)
    keys, values = keys.bfloat16(), values.bfloat16()
    cos, sin = RotaryTables(_config(16), 16).of(0)

    def store(first: int, count: int) -> None:
        at = torch.arange(first, first + count)
        rotate_and_store(torch.ones(count, 3, 16), 1, (cos, sin), at, keys, values, at)

    store(0, 3)
    assert values[0, 0, 1].tolist() == [[1.0, 0.0]] * 16
    store(3, 1)
    assert values[0, 0, 1].tolist() == [[1.0, 1.0]] * 16
    assert values[0, 0, 2:].isnan().all()


def test_rotary_tables_of_unknown_scaling_are_refused() -> None:
    config = ModelConfig("llama", 1, 64, 64, 4, 2, 16, 100, 512, 1e-5, 1e4, RopeScaling("yarn", 2.0))
    with pytest.raises(ValueError, match="'yarn'"):
        RotaryTables(config, 8)
