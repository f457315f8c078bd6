"""From a StepPlan to the model's ForwardBatch, in buffers allocated once. Step thread only."""

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from kernels.batch import ForwardBatch
from scheduler.plan import ScheduledRow, StepPlan

NOTHING_PENDING: Mapping[int, int] = MappingProxyType({})


class BatchBuffers:
    """Arrays sized for the largest plan; a batch is a view of them and is valid until the next fill."""

    def __init__(
        self, *, max_num_rows: int, max_num_tokens: int, max_num_blocks: int, block_size: int
    ) -> None:
        self._block_size = block_size
        self._max_num_tokens = max_num_tokens
        self._max_num_rows = max_num_rows
        self._max_num_blocks = max_num_blocks
        self._slot_tables = np.zeros((max_num_rows, max_num_blocks), dtype=np.int32)
        self._known_tables: list[tuple[int, ...]] = [()] * max_num_rows
        self._block_tables = np.zeros(max_num_rows * max_num_blocks, dtype=np.int32)
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._slot_mapping = np.zeros(max_num_tokens, dtype=np.int64)
        self._query_start = np.zeros(max_num_rows + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_num_rows, dtype=np.int32)
        self._ramp = np.arange(max_num_tokens, dtype=np.int64)

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._known_tables[slot] = ()
            self._slot_tables[slot] = 0

    def fill(self, plan: StepPlan, pending: Mapping[int, int] = NOTHING_PENDING) -> ForwardBatch:
        """The batch of a plan. `pending` maps the index of each pending row to its token.

        Raises IndexError for a slot, and AssertionError for sizes, beyond the limits the buffers were made for.
        """
        rows = plan.rows
        lengths = np.fromiter((len(row.token_ids) for row in rows), dtype=np.int32, count=len(rows))
        num_tokens = int(lengths.sum())
        assert num_tokens <= self._max_num_tokens, (
            f"{num_tokens} tokens in a plan; limit {self._max_num_tokens}"
        )
        assert len(rows) <= self._max_num_rows, f"{len(rows)} rows in a plan; limit {self._max_num_rows}"
        tokens = chain.from_iterable(row.token_ids for row in rows)
        self._token_ids[:num_tokens] = np.fromiter(tokens, dtype=np.int64, count=num_tokens)
        if pending:
            # Rows of one token come first, so that there a row and its token have the same index.
            self._token_ids[list(pending)] = list(pending.values())
        computed = np.fromiter((row.num_computed_tokens for row in rows), dtype=np.int64, count=len(rows))
        query_start = self._query_start[: len(rows) + 1]
        np.cumsum(lengths, out=query_start[1:])
        np.add(computed, lengths, out=self._context_lens[: len(rows)], casting="unsafe")
        tables = self._gather_tables(rows)
        self._place_tokens(lengths, computed, query_start, tables)
        sampled = np.fromiter((row.sampling is not None for row in rows), dtype=np.bool_, count=len(rows))
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            slot_mapping=torch.from_numpy(self._slot_mapping[:num_tokens]),
            block_tables=torch.from_numpy(tables),
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(self._context_lens[: len(rows)]),
            sample_indices=torch.from_numpy(query_start[1:][sampled].astype(np.int64) - 1),
            num_decode_rows=_num_leading_ones(lengths),
        )

    def _gather_tables(self, rows: tuple[ScheduledRow, ...]) -> npt.NDArray[np.int32]:
        """[num_rows, widest]; a slot's table is written again only when it has changed."""
        slots = np.fromiter((row.slot for row in rows), dtype=np.int64, count=len(rows))
        if slots.size and not 0 <= slots.min() <= slots.max() < self._max_num_rows:
            # Not assert, which python -O leaves out: on a GPU slots index raw memory.
            raise IndexError(f"slots from {slots.min()} to {slots.max()}; limit {self._max_num_rows}")
        width = 1
        for row in rows:
            table = row.block_table
            width = max(width, len(table))
            known = self._known_tables[row.slot]
            if table is not known and table != known:
                assert len(table) <= self._max_num_blocks, (
                    f"request {row.request_id}: {len(table)} blocks; limit {self._max_num_blocks}"
                )
                self._slot_tables[row.slot, : len(table)] = table
                self._slot_tables[row.slot, len(table) : len(known)] = 0
            self._known_tables[row.slot] = table
        tables = self._block_tables[: len(rows) * width].reshape(len(rows), width)
        np.take(self._slot_tables[:, :width], slots, axis=0, out=tables)
        return tables

    def _place_tokens(
        self,
        lengths: npt.NDArray[np.int32],
        computed: npt.NDArray[np.int64],
        query_start: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> None:
        """Fill in each token's position and where its K/V is written."""
        num_tokens = int(query_start[-1])
        row_of = np.repeat(self._ramp[: len(lengths)], lengths)
        positions, kv_slots = self._positions[:num_tokens], self._slot_mapping[:num_tokens]
        np.add(self._ramp[:num_tokens], (computed - query_start[:-1])[row_of], out=positions)
        block_idx, offset = np.divmod(positions, self._block_size)
        np.multiply(tables[row_of, block_idx], self._block_size, out=kv_slots, dtype=np.int64)
        np.add(kv_slots, offset, out=kv_slots)


def _num_leading_ones(lengths: npt.NDArray[np.int32]) -> int:
    longer = np.flatnonzero(lengths != 1)
    return int(longer[0]) if longer.size else len(lengths)
