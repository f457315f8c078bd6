"""Block pool: conservation, prefix cache, eviction."""

import pytest

from scheduler.blocks import BlockPool, chain_hash, tenant_salt


def hashes(tenant: str, *blocks: tuple[int, ...]) -> list[bytes]:
    chain = [tenant_salt(tenant)]
    for block in blocks:
        chain.append(chain_hash(chain[-1], block))
    return chain[1:]


def filled(pool: BlockPool, names: list[bytes]) -> tuple[int, ...]:
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    return blocks


def test_every_block_is_free_cached_or_held() -> None:
    pool = BlockPool(8, 4)
    plain = pool.allocate(3)
    named = filled(pool, hashes("", (1, 2, 3, 4), (5, 6, 7, 8)))
    assert (pool.num_free, pool.num_cached, pool.num_held) == (3, 0, 5)
    pool.release(plain)
    pool.release(named)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (6, 2, 0)
    pool.check()


def test_a_shared_block_is_held_until_the_last_holder_leaves() -> None:
    pool = BlockPool(4, 4)
    names = hashes("", (1, 2, 3, 4))
    blocks = filled(pool, names)
    found = pool.match(names)
    pool.hold(found)
    assert found == blocks
    assert pool.num_freed_by([blocks]) == 0
    assert pool.num_freed_by([blocks, blocks]) == 1
    pool.release(blocks)
    assert pool.num_held == 1
    pool.release(blocks)
    assert (pool.num_held, pool.num_cached) == (0, 1)
    pool.check()


def test_eviction_takes_the_least_recently_used_prefix_and_its_end_first() -> None:
    pool = BlockPool(4, 4)
    old = hashes("", (1,) * 4, (2,) * 4)
    new = hashes("", (3,) * 4, (4,) * 4)
    pool.release(filled(pool, old))
    pool.release(filled(pool, new))
    pool.allocate(1)
    assert len(pool.match(old)) == 1, "the end of the older prefix went first"
    assert len(pool.match(new)) == 2
    pool.allocate(1)
    assert len(pool.match(old)) == 0
    assert len(pool.match(new)) == 2
    pool.check()


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3, 4)
    names = hashes("", (1,) * 4)
    pool.release(filled(pool, names))
    pool.allocate(2)
    assert len(pool.match(names)) == 1


def test_hazard_prefix_cache_shared_between_tenants_is_a_side_channel() -> None:
    pool = BlockPool(4, 4)
    filled(pool, hashes("a", (1, 2, 3, 4)))
    assert pool.match(hashes("b", (1, 2, 3, 4))) == ()
    assert len(pool.match(hashes("a", (1, 2, 3, 4)))) == 1


def test_hazard_weak_hashes_collide() -> None:
    """A block's name covers all before it and where a token ends, in 256 bits."""
    [first, second] = hashes("", (1, 2), (3, 4))
    assert second != hashes("", (3, 4))[0]
    assert second != hashes("", (9, 2), (3, 4))[1]
    assert hashes("", (1, 23))[0] != hashes("", (12, 3))[0]
    assert len(first) == 32


def test_the_first_block_of_a_hash_stands_for_it() -> None:
    pool = BlockPool(4, 4)
    names = hashes("", (1,) * 4)
    first = filled(pool, names)
    second = filled(pool, names)
    assert pool.match(names) == first
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (3, 0), "the second copy is not kept"
    pool.check()


def test_forgotten_blocks_are_not_found_again() -> None:
    pool = BlockPool(4, 4)
    names = hashes("", (1,) * 4, (2,) * 4)
    blocks = filled(pool, names)
    pool.forget(blocks)
    assert pool.match(names) == ()
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check()


def test_releasing_more_than_held_is_caught() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_allocating_more_than_available_is_caught() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)


def test_control_check_finds_a_block_that_leaked() -> None:
    pool = BlockPool(4, 4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="conservation"):
        pool.check()
