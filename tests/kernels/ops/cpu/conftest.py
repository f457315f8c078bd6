"""The compiled CPU kernels need a processor with AVX-512 and VNNI; elsewhere only the portable path is tested."""

import pytest

from kernels.ops.cpu.features import cpu_kernels_supported


@pytest.fixture(autouse=True)
def _needs_cpu_kernels() -> None:
    if not cpu_kernels_supported(quantized=True):
        pytest.skip("this processor has no AVX-512 and int8 dot products")
