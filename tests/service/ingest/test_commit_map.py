"""The map of completed offsets in commit metadata: read back exactly, or not at all."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.ingest.offsets import MAX_METADATA_BYTES, decode_completed, encode_completed

committed_offsets = st.integers(0, 2**62)
runs = st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 2**20)), max_size=60)


def ranges_from(committed: int, pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    ranges = []
    position = committed
    for gap, length in pairs:
        ranges.append((position + gap, position + gap + length))
        position += gap + length
    return tuple(ranges)


@given(committed_offsets, runs)
def test_round_trip(committed: int, pairs: list[tuple[int, int]]) -> None:
    ranges = ranges_from(committed, pairs)
    text = encode_completed(committed, ranges)
    assert text.isascii()
    assert len(text) <= MAX_METADATA_BYTES
    assert (decode_completed(committed, text) or ()) == ranges


@given(committed_offsets, runs, st.integers(0, 400))
def test_a_limit_keeps_the_leading_ranges(committed: int, pairs: list[tuple[int, int]], limit: int) -> None:
    ranges = ranges_from(committed, pairs)
    text = encode_completed(committed, ranges, limit)
    assert len(text) <= limit
    kept = decode_completed(committed, text) or ()
    assert kept == ranges[: len(kept)]


@given(committed_offsets, runs.filter(bool), st.data())
def test_hazard_garbled_map_is_ignored(
    committed: int, pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    text = encode_completed(committed, ranges_from(committed, pairs))
    at = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]))
    garbled = text[:at] + character + text[at + 1 :]
    assert decode_completed(committed, garbled) in (None, ranges_from(committed, pairs))
    assert decode_completed(committed, text[:at]) is None


@given(committed_offsets, runs.filter(bool), st.integers(1, 1000))
def test_hazard_map_is_not_read_against_an_offset_that_was_moved(
    committed: int, pairs: list[tuple[int, int]], moved: int
) -> None:
    text = encode_completed(committed, ranges_from(committed, pairs))
    assert decode_completed(committed + moved, text) is None


@given(st.text(max_size=200))
def test_metadata_of_other_programs_is_ignored(text: str) -> None:
    assert decode_completed(0, text) is None
    assert decode_completed(0, "tailrace1:" + text) is None


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\x01", b"\x00\x01", b"\x01\x00", b"\xff" * 20])
def test_payloads_that_we_never_write_are_ignored_even_with_a_good_checksum(payload: bytes) -> None:
    import zlib

    crc = zlib.crc32(payload, zlib.crc32((3).to_bytes(8, "big"))).to_bytes(4, "big")
    assert decode_completed(3, "tailrace1:" + base64.urlsafe_b64encode(crc + payload).decode()) is None


def test_no_completed_ranges_give_an_empty_text() -> None:
    assert encode_completed(9, []) == ""
    assert decode_completed(9, "") is None
    assert decode_completed(9, None) is None


def test_oversize_text_is_not_even_decoded() -> None:
    assert decode_completed(0, "tailrace1:" + "A" * MAX_METADATA_BYTES) is None
