"""Which instruction multiplies bfloat16, and that every choice gives correct results."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.errors import OptionsError
from kernels.loading import load_runner
from kernels.ops.cpu import product as module
from kernels.ops.cpu.features import cpu_kernels_supported, processor_features
from kernels.ops.cpu.intrinsics import I16, f32, u16
from kernels.ops.cpu.jit import compiled_function, intrinsic, jit_inline, types
from kernels.ops.cpu.product import Product, bf16_product, left_bytes, set_bf16_product
from kernels.ops.cpu.product_choice import choose_bf16_product, product_rates
from kernels.ops.cpu.vectors import rounded_bits
from tests.kernels.tiny import make_model, save
from tests.support.configs import runner_options

ROOT = Path(__file__).resolve().parents[4]
needs_dot = pytest.mark.skipif(
    "avx512bf16" not in processor_features(), reason="this processor has no bfloat16 dot product"
)
OTHER = {Product.DOT: Product.FMA, Product.FMA: Product.DOT}
KERNEL_TESTS = (
    "tests/kernels/ops/cpu/test_linear.py",
    "tests/kernels/ops/cpu/test_paged_attention.py",
    "tests/kernels/ops/test_attention_scores.py",
    "tests/kernels/ops/cpu/test_rows.py",
    "tests/kernels/models/cpu/test_fused.py",
)
RUN_TESTS = """
import sys
import pytest
from kernels.ops.cpu.product import bf16_product
from kernels.ops.cpu.product_choice import choose_bf16_product
choose_bf16_product(sys.argv[1])
code = pytest.main(["-q", "-p", "no:cacheprovider", "-rs", *sys.argv[2:]])
print("computed by", bf16_product())
sys.exit(code)
"""
SKYLAKE = "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512cd"


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has loaded no model yet."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_chosen", None)
        yield


def _run_kernel_tests(product: str, *tests: str, **environ: str) -> str:
    """Run the kernels' own tests in a process with another product; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_TESTS, product, *tests],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " skipped" not in done.stdout
    return done.stdout


@needs_dot
def test_kernels_with_the_other_product() -> None:
    other = OTHER[bf16_product()]
    assert f"computed by {other}" in _run_kernel_tests(other, *KERNEL_TESTS)


@pytest.mark.parametrize(
    ("processor", "features", "tests"),
    [
        ("cascadelake", SKYLAKE + ",avx512vnni", KERNEL_TESTS[:-1]),
        ("skylake-avx512", SKYLAKE, (KERNEL_TESTS[-1], "-k", "not int8")),
    ],
)
def test_hazard_kernels_on_a_processor_without_bfloat16_instructions(
    processor: str, features: str, tests: tuple[str, ...]
) -> None:
    """LLVM ends the process if it must emit an instruction that the processor lacks."""
    output = _run_kernel_tests(
        "auto",
        *tests,
        NUMBA_CPU_NAME=processor,
        NUMBA_CPU_FEATURES=",".join(f"+{name}" for name in features.split(",")),
    )
    assert "computed by fma" in output


@needs_dot
@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize(("fma_rate", "expected"), [(3.0, "fma"), (1.1, "dot"), (0.5, "dot")])
def test_the_quicker_product_is_taken(
    fma_rate: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {Product.DOT: 1.0, Product.FMA: fma_rate}
    monkeypatch.setattr("kernels.ops.cpu.product_choice.product_rates", lambda: rates)
    choose_bf16_product()
    assert bf16_product() == expected
    assert left_bytes() == {"dot": 2, "fma": 4}[expected]


@pytest.mark.usefixtures("undecided")
def test_without_dot_products_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processor_features", lambda: frozenset({"avx512f"}))
    monkeypatch.setattr("kernels.ops.cpu.product_choice.product_rates", lambda: pytest.fail("measured"))
    choose_bf16_product()
    assert bf16_product() is Product.FMA
    with pytest.raises(ValueError, match="bf16_product is dot; this processor has no AVX-512 bfloat16"):
        set_bf16_product(Product.DOT)


@pytest.mark.usefixtures("undecided")
def test_reading_a_product_that_is_not_set_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="bf16_product is not set"):
        bf16_product()


@pytest.mark.usefixtures("undecided")
def test_auto_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.ops.cpu.product_choice.product_rates", lambda: pytest.fail("measured"))
    set_bf16_product(Product.FMA)
    choose_bf16_product()
    assert bf16_product() is Product.FMA


@needs_dot
def test_rates_are_those_of_both_products() -> None:
    rates = product_rates()
    assert rates.keys() == OTHER.keys()
    assert all(1e8 < rate < 1e13 for rate in rates.values())


@needs_dot
def test_a_second_product_in_a_process_is_refused(tmp_path: Path) -> None:
    """Kernels compiled for one layout of rows would read rows of the other."""
    now = bf16_product()
    set_bf16_product(now)
    folder = save(make_model("llama"), tmp_path)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 1 << 20, "num_threads": 1}
    with pytest.raises(OptionsError, match=f"bf16_product is {OTHER[now]}; this process computes with {now}"):
        load_runner(runner_options(str(folder), bf16_product=OTHER[now].value, **options))


@intrinsic
def _rounded(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.trunc(rounded_bits(builder, arguments[0]), I16)

    return types.uint16(types.float32), generate


@jit_inline
def _round_all(values: int, count: int, out: int) -> None:
    value, half = f32(values), u16(out)
    for i in range(count):
        half[i] = _rounded(value[i])


@compiled_function
def _round(values: int, count: int, out: int) -> None:
    _round_all(values, count, out)


@pytest.mark.skipif(not cpu_kernels_supported(), reason="this processor runs the portable path")
def test_rounding_without_the_instruction_is_to_nearest_even() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    special = np.array([0, 1 << 31, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF], np.uint32)
    values = torch.from_numpy(np.concatenate((bits, ties, special)).view(np.float32))
    got = torch.empty(values.shape, dtype=torch.bfloat16)
    _round(values.data_ptr(), values.shape[0], got.data_ptr())
    expected = values.bfloat16()
    assert torch.equal(got.isnan(), values.isnan())
    number = ~values.isnan()
    assert torch.equal(got[number].view(torch.int16), expected[number].view(torch.int16))
