"""Sets up the process for tests that call kernels without a runner, on either kind of device.

In folders called gpu, three modes share one process, because the tensors' device chooses (see kernels.ops.gpu.jit):
CPU tensors are interpreted, meta tensors are recorded and compiled ahead, CUDA tensors run. TRITON_INTERPRET must not
be set: it would turn triton.language's own functions into interpreted ones for the whole process, compiler included.
"""

import os

import pytest
import torch

from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.ops.cpu.product_choice import choose_bf16_product


@pytest.fixture(autouse=True, scope="session")
def _bf16_product() -> None:
    """Compiled kernels cannot be used before their product is set, which loading a model does."""
    if cpu_kernels_supported():
        choose_bf16_product()


@pytest.fixture(autouse=True)
def _one_thread_for_the_interpreter(request: pytest.FixtureRequest) -> None:
    if request.path.parent.name == "gpu":
        assert os.environ.get("TRITON_INTERPRET", "0") == "0", (
            "TRITON_INTERPRET is set; these tests choose by device"
        )
        torch.set_num_threads(1)


@pytest.fixture
def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device())
