"""The compiled CPU kernels need a processor with bfloat16 dot products; elsewhere the portable path is tested alone."""

import pytest
import torch

from kernels.ops.cpu.jit import cpu_kernels_supported


@pytest.fixture(autouse=True)
def _needs_cpu_kernels() -> None:
    if not cpu_kernels_supported():
        pytest.skip("this processor has no AVX-512 bfloat16 and int8 dot products")


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    torch.manual_seed(0)
