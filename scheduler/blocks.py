"""Accounting of the KV pool: who holds which block, and what may be reused or evicted."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def tenant_salt(tenant: str) -> bytes:
    """Start of a tenant's hash chains: equal prompts of two tenants never meet in the cache."""
    return hashlib.blake2b(tenant.encode(), digest_size=32, person=b"tailrace-tenant").digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of a full block: stands for its tokens and everything before them."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class BlockPool:
    """A fixed set of blocks, each free, cached or held.

    free: no content worth keeping. cached: held by nobody, but its content can be found by hash.
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
        """Blocks that `allocate` can hand out, evicting cached ones."""
        return len(self._free) + len(self._cached)

    def match(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Blocks of the longest known prefix. They are safe only once held."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` stop being available when they are held."""
        return sum(self._num_refs[block] == 0 for block in blocks)

    def num_freed_by(self, tables: Iterable[Sequence[int]], wanted: Sequence[int] = ()) -> int:
        """How many blocks become available when all of `tables` are released to whoever holds `wanted` then."""
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
        """Blocks for new content; the caller has checked `num_available`."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks wanted, {self.num_available} available"
        blocks = tuple(self._free.pop() if self._free else self._evict() for _ in range(num_blocks))
        for block in blocks:
            self._num_refs[block] = 1
        self._num_held += num_blocks
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference to each block back. The end of a prefix becomes evictable before its start."""
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
        """Make a held, full and computed block findable. The first block of a hash stands for it."""
        assert self._num_refs[block] > 0, f"block {block} published while nobody holds it"
        if self._hash_of[block] is None and block_hash not in self._by_hash:
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Make held blocks unfindable, because their content is not to be trusted."""
        for block in blocks:
            assert self._num_refs[block] > 0, f"block {block} forgotten while nobody holds it"
            block_hash = self._hash_of[block]
            if block_hash is not None:
                del self._by_hash[block_hash]
                self._hash_of[block] = None

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the books agree. O(blocks)."""
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
