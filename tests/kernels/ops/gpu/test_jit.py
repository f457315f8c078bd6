"""One kernel in three modes in one process, and what we rely on in Triton's interpreter."""

import threading

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernels.ops.gpu.interpreter import interpreting
from kernels.ops.gpu.jit import device_function, kernel
from kernels.tools.aot import _specialize, compile_launch, record

SIZE = 64


@device_function
def _double(value: tl.tensor) -> tl.tensor:
    return value * 2


@kernel("num_rows")
def _sum_kernel(x: tl.tensor, out: tl.tensor, num_rows: tl.tensor, N: tl.constexpr) -> None:  # noqa: N803  Triton's way
    row = tl.program_id(0)
    values = tl.load(x + row * N + tl.arange(0, N)).to(tl.float32)
    tl.store(out + row, _double(tl.sum(values, axis=0)).to(out.dtype.element_ty))


@kernel()
def _convert_kernel(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:  # noqa: N803  Triton's way
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@kernel()
def _dot_kernel(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:  # noqa: N803  Triton's way
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at)
    tl.store(out + at, tl.dot(value, value))


def _sum_of(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    _sum_kernel.launch((x.shape[0],), {"x": x, "out": out, "num_rows": x.shape[0], "N": x.shape[1]})
    return out


def test_cpu_tensors_are_interpreted_device_functions_and_library_included() -> None:
    x = torch.randn(3, SIZE)
    torch.testing.assert_close(_sum_of(x), 2 * x.sum(1))


def test_meta_tensors_are_recorded_and_compile_for_a_device_that_is_not_there() -> None:
    launches = record(lambda: _sum_of(torch.empty(3, SIZE, device="meta")))
    assert [launch.kernel.name for launch in launches] == ["sum_kernel"]
    found = compile_launch(launches[0], 90)
    assert found.registers > 0
    assert found.spill_bytes == 0


def test_hazard_interpretation_leaves_the_compiler_intact() -> None:
    """Triton's own call of a device function in the interpreter patches triton.language and never restores it."""
    before = (JITFunction.__call__, tl.load, tl.core.load, tl.tensor.to, tl.reduce, tl.core.reduce)
    _sum_of(torch.randn(3, SIZE))
    assert before == (JITFunction.__call__, tl.load, tl.core.load, tl.tensor.to, tl.reduce, tl.core.reduce)
    launch = record(lambda: _sum_of(torch.empty(2, 2 * SIZE, device="meta")))[0]
    assert compile_launch(launch, 80).arch == 80


def test_interpretation_is_undone_when_the_kernel_fails() -> None:
    before = (JITFunction.__call__, tl.load, tl.core.reduce)
    with pytest.raises(RuntimeError, match="stopped"), interpreting():
        raise RuntimeError("stopped")
    assert before == (JITFunction.__call__, tl.load, tl.core.reduce)


def test_interpretation_holds_off_a_compilation_in_another_thread() -> None:
    launch = record(lambda: _sum_of(torch.empty(1, 4 * SIZE, device="meta")))[0]
    compiled = threading.Event()
    thread = threading.Thread(target=lambda: (compile_launch(launch, 80), compiled.set()))
    with interpreting():
        thread.start()
        assert not compiled.is_set()
    thread.join(timeout=60)
    assert compiled.is_set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_hazard_the_interpreter_rounds_like_the_hardware(dtype: torch.dtype) -> None:
    """Its own conversion to fp8 loses the carry (1.97 becomes 1.0), and to bfloat16 it truncates."""
    x = torch.cat((torch.tensor([1.97, 3.99, 0.9999, -1.97, 0.0, 1e-3, 100.0, 447.0]), torch.randn(SIZE - 8)))
    out = torch.zeros(SIZE, dtype=torch.float32).to(dtype)
    _convert_kernel.launch((1,), {"x": x, "out": out, "N": SIZE})
    assert torch.equal(out.float(), x.to(dtype).float())


def test_hazard_the_interpreter_multiplies_bfloat16_not_its_bits() -> None:
    x = torch.randn(16, 16).bfloat16()
    out = torch.empty(16, 16)
    _dot_kernel.launch((1,), {"x": x, "out": out, "N": 16})
    torch.testing.assert_close(out, x.float() @ x.float(), atol=1e-4, rtol=1e-4)


def test_an_empty_grid_launches_nothing() -> None:
    assert _sum_of(torch.empty(0, SIZE)).shape == (0,)
    assert record(lambda: _sum_of(torch.empty(0, SIZE, device="meta"))) == []


def test_a_parameter_that_changes_from_step_to_step_makes_no_new_variant() -> None:
    """`num_rows` of 1, 16 and 17 would be three compilations, the last two while serving."""

    def specialized(num_rows: int) -> object:
        launch = record(lambda: _sum_of(torch.empty(num_rows, SIZE, device="meta")))[0]
        return _specialize(launch.kernel.compiled, launch.arguments)

    assert specialized(1) == specialized(16) == specialized(17)
