import pytest
import torch

from kernels.model_config import ModelConfig
from kernels.runtime.kv_pool import KVPool, bytes_per_block

CONFIG = ModelConfig("llama", 3, 64, 64, 4, 2, 16, 100, 512, 1e-5, 10000.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 48])
def test_memory_is_exact_to_the_block(dtype: torch.dtype, block_size: int) -> None:
    pool = KVPool(CONFIG, 7, block_size, dtype)
    assert pool.nbytes == 7 * bytes_per_block(CONFIG, block_size, dtype)


def test_copy_blocks_copies_every_layer_and_nothing_else() -> None:
    pool = KVPool(CONFIG, 5, 16, torch.float32)
    pool.keys.normal_()
    pool.values.normal_()
    before = pool.keys.clone(), pool.values.clone()
    pool.copy_blocks([(0, 3), (2, 4)])
    for now, then in zip((pool.keys, pool.values), before, strict=True):
        assert torch.equal(now[:, [0, 1, 2]], then[:, [0, 1, 2]])
        assert torch.equal(now[:, [3, 4]], then[:, [0, 2]])
    pool.copy_blocks([])


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [(0, 16, "num_blocks is 0"), (4, 24, "block_size is 24"), (4, 0, "block_size is 0")],
)
def test_impossible_pools_are_refused(num_blocks: int, block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVPool(CONFIG, num_blocks, block_size, torch.float32)
