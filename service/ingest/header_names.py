"""Repairs names of record headers that are not UTF-8. Kafka accepts them and aiokafka raises: without the repair one
such record would block its partition forever.

Layout of a record batch of version 2: https://kafka.apache.org/documentation/#recordbatch
"""

import struct

from aiokafka.record.default_records import _DefaultRecordBatchPy as RecordBatch
from aiokafka.record.util import calc_crc32c, decode_varint

_FRAME = struct.Struct(">qi")
"""Base offset; length of what follows."""
_MAGIC_AT = 16
_CRC_AT = 17
_ATTRIBUTES_AT = 21
_NUM_RECORDS_AT = 57
_RECORDS_AT = 61
_COMPRESSION = 0b111


def with_readable_header_names(data: bytes) -> bytes:
    """Returns the record batches uncompressed, with `?` for each non-ASCII byte of a header name that is not UTF-8.

    Everything else keeps its bytes. A batch of an older version has no headers; a truncated one at the end of a fetch
    is passed on unchanged, and so is a damaged one, which aiokafka then refuses.
    """
    repaired = []
    position = 0
    while position + _FRAME.size <= len(data):
        _, length = _FRAME.unpack_from(data, position)
        end = position + _FRAME.size + length
        if end > len(data) or length <= _MAGIC_AT - _FRAME.size:
            break
        batch = data[position:end]
        repaired.append(_repaired(batch) if batch[_MAGIC_AT] == 2 else batch)
        position = end
    return b"".join([*repaired, data[position:]])


def _repaired(batch: bytes) -> bytes:
    if len(batch) < _RECORDS_AT:
        return batch
    reader = RecordBatch(bytearray(batch))
    if not reader.validate_crc():
        return batch  # the new checksum would make it look sound
    reader._maybe_uncompress()
    records = bytearray(reader._buffer[reader._pos :])
    (num_records,) = struct.unpack_from(">i", batch, _NUM_RECORDS_AT)
    position = 0
    for _ in range(num_records):
        position = _repair_record(records, position)
    head = bytearray(batch[:_RECORDS_AT])
    (attributes,) = struct.unpack_from(">h", head, _ATTRIBUTES_AT)
    struct.pack_into(">h", head, _ATTRIBUTES_AT, attributes & ~_COMPRESSION)
    struct.pack_into(">i", head, 8, len(head) + len(records) - _FRAME.size)
    whole = bytes(head + records)
    crc = struct.pack(">I", calc_crc32c(whole[_ATTRIBUTES_AT:]))
    return whole[:_CRC_AT] + crc + whole[_ATTRIBUTES_AT:]


def _repair_record(records: bytearray, position: int) -> int:
    """Repairs one record in place; returns where the next one begins."""
    length, position = decode_varint(records, position)
    end = position + length
    for _ in range(3):  # attributes, timestamp, offset
        _, position = decode_varint(records, position)
    for _ in range(2):  # key, value
        size, position = decode_varint(records, position)
        position += max(0, size)
    num_headers, position = decode_varint(records, position)
    for _ in range(num_headers):
        size, position = decode_varint(records, position)
        name = bytes(records[position : position + size])
        records[position : position + size] = _readable(name)
        position += size
        size, position = decode_varint(records, position)
        position += max(0, size)
    return int(end)


def _readable(name: bytes) -> bytes:
    """Returns as many bytes, so that no length changes."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return bytes(byte if byte < 0x80 else ord("?") for byte in name)
    return name
