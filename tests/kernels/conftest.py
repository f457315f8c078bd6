"""Does for the process what loading a model does, for tests that call kernels without one."""

import pytest

from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.ops.cpu.product_choice import choose_bf16_product


@pytest.fixture(autouse=True, scope="session")
def _bf16_product() -> None:
    """Compiled kernels cannot be used before their product is set."""
    if cpu_kernels_supported():
        choose_bf16_product()
