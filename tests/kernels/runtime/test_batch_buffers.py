"""The batch built from a plan, against a plain construction, over plans that follow each other in the same buffers."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.batch import ForwardBatch
from kernels.runtime.batch_buffers import BatchBuffers
from scheduler.plan import SamplingParams, ScheduledRow, StepPlan

BLOCK_SIZE, MAX_ROWS, MAX_BLOCKS = 4, 6, 8
GREEDY = SamplingParams(seed=0, temperature=0.0)


@st.composite
def rows_strategy(draw: st.DrawFn) -> list[ScheduledRow]:
    slots = draw(st.lists(st.integers(0, MAX_ROWS - 1), unique=True, min_size=1))
    rows = []
    for slot in slots:
        num_tokens = draw(st.integers(1, 6))
        computed = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE - num_tokens))
        num_blocks = -(-(computed + num_tokens) // BLOCK_SIZE)
        rows.append(
            ScheduledRow(
                request_id=str(slot),
                slot=slot,
                token_ids=tuple(draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens))),
                num_computed_tokens=computed,
                block_table=tuple(draw(st.permutations(range(1, 20)))[:num_blocks]),
                sampling=draw(st.sampled_from([GREEDY, None])),
                num_generated_tokens=0,
            )
        )
    return sorted(rows, key=lambda row: len(row.token_ids) > 1)


def make_buffers() -> BatchBuffers:
    return BatchBuffers(
        max_num_rows=MAX_ROWS, max_num_tokens=36, max_num_blocks=MAX_BLOCKS, block_size=BLOCK_SIZE
    )


def check(batch: ForwardBatch, rows: Sequence[ScheduledRow]) -> None:
    positions = [range(row.num_computed_tokens, row.sample_position) for row in rows]
    width = max(len(row.block_table) for row in rows)
    ends = [sum(len(row.token_ids) for row in rows[: idx + 1]) for idx in range(len(rows))]
    assert batch.token_ids.tolist() == [token_id for row in rows for token_id in row.token_ids]
    assert batch.positions.tolist() == [position for row_positions in positions for position in row_positions]
    assert batch.slot_mapping.tolist() == [
        row.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, row_positions in zip(rows, positions, strict=True)
        for position in row_positions
    ]
    assert batch.block_tables.tolist() == [
        [*row.block_table, *[0] * (width - len(row.block_table))] for row in rows
    ]
    assert batch.query_start.tolist() == [0, *ends]
    assert batch.context_lens.tolist() == [row.sample_position for row in rows]
    assert batch.sample_indices.tolist() == [
        end - 1 for row, end in zip(rows, ends, strict=True) if row.sampling is not None
    ]
    assert batch.num_decode_rows == sum(len(row.token_ids) == 1 for row in rows)


@settings(max_examples=80, deadline=None)
@given(
    plans=st.lists(st.tuples(rows_strategy(), st.sets(st.integers(0, MAX_ROWS - 1))), min_size=1, max_size=5)
)
def test_batches_follow_their_plans(plans: list[tuple[list[ScheduledRow], set[int]]]) -> None:
    buffers = make_buffers()
    for rows, released in plans:
        buffers.release(released)
        check(buffers.fill(StepPlan(0, tuple(rows))), rows)


def _row(slot: int, num_tokens: int, table: tuple[int, ...]) -> ScheduledRow:
    return ScheduledRow(str(slot), slot, (1,) * num_tokens, 0, table, GREEDY, 0)


def test_plan_beyond_the_limits_is_a_bug_of_ours() -> None:
    buffers = make_buffers()

    with pytest.raises(AssertionError, match="37 tokens in a plan; limit 36"):
        buffers.fill(StepPlan(0, (_row(0, 37, (1,) * 10),)))
    with pytest.raises(AssertionError, match="request 0: 9 blocks; limit 8"):
        buffers.fill(StepPlan(0, (_row(0, 1, (1,) * 9),)))


@pytest.mark.parametrize("slot", [-1, MAX_ROWS, 1_000_000])
def test_hazard_a_slot_out_of_range_is_refused(slot: int) -> None:
    """On a GPU the slot indexes raw memory, so this must not be an assert, which `python -O` leaves out."""
    with pytest.raises(IndexError, match=f"slots from .* limit {MAX_ROWS}"):
        make_buffers().fill(
            StepPlan(0, (_row(0, 1, (0,)) if slot > 0 else _row(1, 1, (0,)), _row(slot, 1, (0,))))
        )
