import pytest
import torch

from kernels.ops.linear.packing import group_size, pack_gate_up, pack_linear
from kernels.ops.linear.portable import make_linear
from kernels.ops.silu_mul.reference import silu_mul_reference
from tests.kernels.ops.cpu.cpu_calls import gate_up_gelu_mul, gate_up_silu_mul, linear

ROWS = [1, 2, 3, 5, 7, 8, 11, 12, 13, 24, 64, 97, 200]


@pytest.mark.parametrize("rows", ROWS)
def test_bf16_product_at_every_tile_height(rows: int) -> None:
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(80, 96).bfloat16()
    torch.testing.assert_close(
        linear(x, pack_linear(weight)), x.float() @ weight.float().T, atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("num_outputs", [1, 16, 31, 32, 33, 199])
@pytest.mark.parametrize("num_inputs", [4, 36, 576])
@pytest.mark.parametrize("quantized", [False, True])
def test_outputs_and_inputs_of_any_size_with_bias(num_outputs: int, num_inputs: int, quantized: bool) -> None:
    x, weight = torch.randn(5, num_inputs).bfloat16(), torch.randn(num_outputs, num_inputs).bfloat16()
    bias = torch.randn(num_outputs)
    got = linear(x, pack_linear(weight, bias, quantized=quantized))
    expected = x.float() @ weight.float().T + bias
    tolerance = 0.05 * num_inputs**0.5 if quantized else 1e-3
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("rows", [48, 50, 190])
@pytest.mark.parametrize("quantized", [False, True])
def test_many_tiles_are_taken_two_panels_at_a_time(rows: int, quantized: bool) -> None:
    x, weight = torch.randn(rows, 64).bfloat16(), torch.randn(2050, 64).bfloat16()
    packed = pack_linear(weight, quantized=quantized)
    got = linear(x, packed)
    one_by_one = torch.cat([linear(x[row : row + 1], packed) for row in range(rows)])
    assert torch.equal(got, one_by_one)
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(got, expected, atol=0.8 if quantized else 1e-3, rtol=1e-3)


def test_int8_product_is_exact_in_its_own_arithmetic() -> None:
    """Integers up to 127 in every group and output survive quantization, so the product must be exact."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-127, 128, (13, 384), generator=generator).float()
    weight = torch.randint(-127, 128, (40, 384), generator=generator).float()
    x[:, :: group_size(384)] = 127
    weight[:, 0] = 127
    assert torch.equal(linear(x, pack_linear(weight, quantized=True)), x @ weight.T)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(rows: int, quantized: bool) -> None:
    x, weight = torch.randn(rows, 192).bfloat16(), torch.randn(64, 192)
    packed = pack_linear(weight, quantized=quantized)
    together = linear(x, packed)
    assert torch.equal(together[rows // 2], linear(x[rows // 2 : rows // 2 + 1], packed)[0])


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_spoil_their_own_row_only(quantized: bool, bad: float) -> None:
    x, weight = torch.randn(6, 64), torch.randn(48, 64)
    x[2, 7] = bad
    got = linear(x, pack_linear(weight, quantized=quantized))
    assert not got[2].isfinite().any()
    assert got[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("intermediate", [16, 20, 112])
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("quantized", [False, True])
def test_gate_up_silu_mul(intermediate: int, rows: int, quantized: bool) -> None:
    x = torch.randn(rows, 64).bfloat16()
    gate, up = torch.randn(2, intermediate, 64).bfloat16() / 8
    packed = pack_gate_up(gate, up, quantized=quantized)
    got = gate_up_silu_mul(x, packed).float()
    expected = silu_mul_reference(x.float() @ torch.cat((gate, up)).float().T)
    torch.testing.assert_close(got, expected, atol=6e-2 if quantized else 2e-2, rtol=2e-2)


def test_silu_of_large_gates_is_the_gate_or_nothing() -> None:
    x = torch.ones(3, 4).bfloat16()
    gate = torch.tensor([-1000.0, -100.0, -1.0, 0.0, 1.0, 100.0, 1000.0]).unsqueeze(1).expand(-1, 4)
    packed = pack_gate_up(gate, torch.full((7, 4), 0.25))
    expected = torch.nn.functional.silu(4 * gate[:, 0]).expand(3, -1)
    torch.testing.assert_close(gate_up_silu_mul(x, packed).float(), expected, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("intermediate", [16, 20, 112])
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("quantized", [False, True])
def test_gate_up_gelu_mul(intermediate: int, rows: int, quantized: bool) -> None:
    x = torch.randn(rows, 64).bfloat16()
    gate, up = torch.randn(2, intermediate, 64).bfloat16() / 8
    got = gate_up_gelu_mul(x, pack_gate_up(gate, up, quantized=quantized)).float()
    ours, theirs = (x.float() @ weight.float().T for weight in (gate, up))
    expected = torch.nn.functional.gelu(ours, approximate="tanh") * theirs
    torch.testing.assert_close(got, expected, atol=6e-2 if quantized else 2e-2, rtol=2e-2)


def gelu_of(values: torch.Tensor) -> torch.Tensor:
    """bfloat16 values pass unchanged: each is one gate of a product with a single non-zero input."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).bfloat16()
    weight = torch.zeros(len(values), 4)
    weight[:, 0] = values
    up = torch.zeros_like(weight)
    up[:, 0] = 1
    return gate_up_gelu_mul(x, pack_gate_up(weight, up))[0].float()


def test_gelu_is_right_to_bfloat16_at_every_magnitude() -> None:
    """Compared with float64, where 1 + tanh keeps digits for negative values. The only error is the rounding."""
    sizes = torch.logspace(-38, 38, 1500).bfloat16().float()
    values = torch.cat((-sizes, torch.zeros(1), torch.linspace(-14, 14, 1500).bfloat16().float(), sizes))
    expected = torch.nn.functional.gelu(values.double(), approximate="tanh")
    torch.testing.assert_close(gelu_of(values).double(), expected, atol=1e-12, rtol=2**-8)


def test_gelu_of_large_gates_is_the_gate_or_nothing() -> None:
    values = torch.tensor([-3e38, -1e20, -1000.0, -100.0, 0.0, 100.0, 1000.0, 1e20, 3e38]).bfloat16().float()
    assert torch.equal(gelu_of(values), values.clamp_min(0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gelu_passes_nan_on(bad: float) -> None:
    """The other gates of the product with a NaN are NaN too: 0 times it; an infinite one is infinite or NaN."""
    x = torch.tensor([[bad, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).bfloat16()
    gate, up = torch.ones(40, 4), torch.ones(40, 4)
    got = gate_up_gelu_mul(x, pack_gate_up(gate, up))
    assert not got[0].isfinite().any()
    assert got[1].isfinite().all()
    up[:, 0] = torch.nan
    assert gate_up_gelu_mul(x[1:], pack_gate_up(gate, up)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
def test_portable_layers(dtype: torch.dtype, quantized: bool) -> None:
    x, weight, bias = (
        torch.randn(5, 64, dtype=dtype),
        torch.randn(48, 64, dtype=dtype),
        torch.randn(48, dtype=dtype),
    )
    got = make_linear(weight, bias, quantized=quantized)(x)
    expected = x.float() @ weight.float().T + bias.float()
    assert got.dtype == dtype
    coarse = quantized or dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=0.5 if coarse else 1e-4, rtol=2e-2)
