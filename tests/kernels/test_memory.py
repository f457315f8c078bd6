import torch

from kernels.memory import Arena, fresh_memory


def test_tensors_lie_side_by_side_and_aligned() -> None:
    arena = Arena(slab_bytes=4096)
    first = arena.empty(torch.Size((3, 5)), torch.bfloat16)
    second = arena.empty(torch.Size((7,)), torch.int8)
    assert first.shape == (3, 5)
    assert second.dtype == torch.int8
    assert first.data_ptr() % 64 == 0
    assert second.data_ptr() - first.data_ptr() == 64


def test_tensors_share_nothing_and_outlive_the_arena() -> None:
    arena = Arena(slab_bytes=256)
    tensors = [arena.empty(torch.Size((100,)), torch.uint8).fill_(value) for value in range(9)]
    del arena
    assert [tensor.unique().tolist() for tensor in tensors] == [[value] for value in range(9)]


def test_tensor_larger_than_a_slab_gets_one_of_its_own() -> None:
    assert Arena(slab_bytes=64).empty(torch.Size((1000,)), torch.float32).fill_(1).sum() == 1000


def test_fresh_memory_is_zero_and_begins_a_large_page() -> None:
    memory = fresh_memory((2 << 20) + 7)
    assert memory.shape == ((2 << 20) + 7,)
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory.any()
