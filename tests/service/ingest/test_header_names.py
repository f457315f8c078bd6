"""Header names that are not UTF-8 are repaired; what is damaged stays damaged."""

import struct

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy as BatchBuilder

from service.ingest.header_names import with_readable_header_names
from tests.support.raw_records import RawName


@pytest.fixture
def batch() -> bytes:
    builder = BatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    builder.append(0, 1, b"key", b"value", [(RawName(b"\xff name"), b"\xff")])
    return bytes(builder.build())


def test_a_name_becomes_readable_and_all_else_stays(batch: bytes) -> None:
    (record,) = DefaultRecordBatch(bytearray(with_readable_header_names(batch)))
    assert (record.key, record.value, list(record.headers)) == (b"key", b"value", [("? name", b"\xff")])


def test_a_damaged_batch_does_not_get_a_checksum_that_fits(batch: bytes) -> None:
    damaged = batch.replace(b"value", b"VALUE")
    assert with_readable_header_names(damaged) == damaged
    assert not DefaultRecordBatch(bytearray(damaged)).validate_crc()


@pytest.mark.parametrize("length", [-(2**31), -13, -12, -1, 0, 4, 5, 48])
def test_a_batch_of_an_impossible_length_ends_the_repair(batch: bytes, length: int) -> None:
    """At -12 the next batch begins where this one does."""
    damaged = batch[:8] + struct.pack(">i", length) + batch[12:]
    assert with_readable_header_names(damaged) == damaged
