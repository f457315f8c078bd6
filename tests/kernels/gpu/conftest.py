"""How the three modes share one process: the tensors' device chooses, see `kernels.ops.gpu.jit`.

CPU tensors are interpreted, meta tensors are recorded and compiled ahead, CUDA tensors run. TRITON_INTERPRET must
not be set: it would turn triton.language's own functions into interpreted ones for the whole process, compiler
included.
"""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", (
        "TRITON_INTERPRET is set; these tests choose by device"
    )
    torch.set_num_threads(1)


@pytest.fixture
def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device())
