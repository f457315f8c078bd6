"""The process that compiles and those that find the kernels on disk must compute the same, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.ops.cpu.features import cpu_kernels_supported

ROOT = Path(__file__).resolve().parents[4]

LOGITS = """
import hashlib, torch
from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.runtime.kv_pool import KVPool
from kernels.loading import make_decoder
from kernels.models.cpu.decoder import FusedDecoder
from kernels.ops.cpu.product_choice import choose_bf16_product
from kernels.weights.layout import expected_shapes

choose_bf16_product()

config = ModelConfig("llama", 2, 192, 512, 6, 2, 32, 512, 128, 1e-5, 1e4, tie_word_embeddings=True)
torch.manual_seed(0)
weights = {name: torch.randn(shape) * 0.2 for name, shape in expected_shapes(config).items()}
pool = KVPool(config, 4, 32, torch.bfloat16, "cpu")
model = make_decoder(config, weights, pool, dtype=torch.bfloat16, num_threads=1)
assert isinstance(model, FusedDecoder)
model.warmup()
n = 40
batch = ForwardBatch(
    torch.arange(n), torch.arange(n), torch.arange(n), torch.tensor([[0, 1]], dtype=torch.int32),
    torch.tensor([0, n], dtype=torch.int32), torch.tensor([n], dtype=torch.int32), torch.arange(n), 0,
)
print(hashlib.sha256(model.forward(batch).numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif(not cpu_kernels_supported(), reason="this processor runs the portable path")
def test_hazard_freshly_compiled_and_cached_kernels_give_the_same_logits(tmp_path: Path) -> None:
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environ.pop("NUMBA_CACHE_DIR", None)
    hashes = [
        subprocess.run(
            [sys.executable, "-c", LOGITS],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert list(tmp_path.glob("tailrace/kernels-*/ready-*")), "nothing was kept"
    assert hashes[0] == hashes[1]
