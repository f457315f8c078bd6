"""Accounts for the KV pool: which blocks are held, which can be reused and which can be evicted."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def tenant_salt(tenant: str) -> bytes:
    """Return the start of the tenant's hash chains, so that tenants never share cached blocks."""
    return hashlib.blake2b(tenant.encode(), digest_size=32, person=b"tailrace-tenant").digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block, which identifies its tokens and all tokens before them."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class BlockPool:
    """A fixed set of blocks, each free, cached or held.

    free: without content to keep. cached: unreferenced, but its content can be found by hash.
    held: referenced by one request, or by several that share a prefix. free + cached + held = total.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._num_held = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return, evicting cached ones."""
        return len(self._free) + len(self._cached)

    def match(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Return the blocks of the longest cached prefix. They may be evicted until `hold` is called."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are available now and would no longer be once held."""
        return sum(self._num_refs[block] == 0 for block in blocks)

    def num_freed_by(self, tables: Iterable[Sequence[int]], wanted: Sequence[int] = ()) -> int:
        """Return how many blocks become available if all of `tables` are released and `wanted` is held afterwards."""
        drops: dict[int, int] = {}
        for table in tables:
            for block in table:
                drops[block] = drops.get(block, 0) + 1
        for block in wanted:
            drops.pop(block, None)
        return sum(self._num_refs[block] == count for block, count in drops.items())

    def hold(self, blocks: Iterable[int]) -> None:
        """Take a reference to blocks found by `match`."""
        for block in blocks:
            if self._num_refs[block] == 0:
                del self._cached[block]
                self._num_held += 1
            self._num_refs[block] += 1

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Return blocks for new content, held once. The caller has checked `num_available`."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks wanted, {self.num_available} available"
        blocks = tuple(self._free.pop() if self._free else self._evict() for _ in range(num_blocks))
        for block in blocks:
            self._num_refs[block] = 1
        self._num_held += num_blocks
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The end of a prefix becomes evictable before its start."""
        for block in reversed(blocks):
            assert self._num_refs[block] > 0, f"block {block} released more often than held"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._num_held -= 1
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a held, full and computed block findable. The first block published under a hash keeps it."""
        assert self._num_refs[block] > 0, f"block {block} published while it is not held"
        if self._hash_of[block] is None and block_hash not in self._by_hash:
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Make held blocks unfindable, because their content may be wrong."""
        for block in blocks:
            assert self._num_refs[block] > 0, f"block {block} forgotten while it is not held"
            block_hash = self._hash_of[block]
            if block_hash is not None:
                del self._by_hash[block_hash]
                self._hash_of[block] = None

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and all counts agree. Takes O(num_blocks)."""
        held = {block for block, count in enumerate(self._num_refs) if count > 0}
        states = [*self._free, *self._cached, *held]
        assert self.num_free + self.num_cached + self.num_held == self.num_blocks, "conservation of blocks"
        assert sorted(states) == list(range(self.num_blocks)), "a block is in two states or in none"
        assert min(self._num_refs) >= 0, "negative reference count"
        assert all(self._hash_of[block] is None for block in self._free), "a free block is findable"
        assert all(self._hash_of[block] is not None for block in self._cached), "a cached block is lost"
        named = {name: block for block, name in enumerate(self._hash_of) if name is not None}
        assert named == self._by_hash, "hash index"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block]
        assert block_hash is not None, f"cached block {block} has no hash"
        del self._by_hash[block_hash]
        self._hash_of[block] = None
        return block
