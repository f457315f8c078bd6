"""What comes back from Kafka beside the records: the map in a commit's metadata, and names of headers."""

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy as BatchBuilder

from service.ingest.header_names import with_readable_header_names
from service.ingest.offsets import (
    MAX_METADATA_BYTES,
    PartitionOffsets,
    Ranges,
    decode_completed,
    encode_completed,
)
from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.target import Outcome, Target, expect
from tests.support.raw_records import RawName

GAPS = (1, 1, 2, 3, 127, 128, 16_383, 16_384, 2**31, 2**40)
_TEXT_TOKENS = (
    b"=",
    b"A",
    b"-_",
    b"+",
    b"/",
    b"\n",
    b"tailrace1:",
    b"tailrace2:",
    b"\xc3\xa9",
    b"====",
    b"\x00",
)
_VARINTS = (
    b"\x00",
    b"\x01",
    b"\x80",
    b"\x80\x00",
    b"\x81\x00",
    b"\xff" * 8 + b"\x7f",
    b"\xff" * 9 + b"\x01",
    b"\x7f",
)


def completed_ranges(rng: Random, committed: int) -> Ranges:
    ranges, position = [], committed
    for _ in range(rng.choice((0, 1, 2, 5, 40))):
        first = position + rng.choice(GAPS)
        position = first + rng.choice(GAPS)
        ranges.append((first, position))
    return tuple(ranges)


@dataclass(frozen=True)
class Metadata:
    committed: int
    text: str
    ranges: Ranges
    """What the text was written from."""
    good: bool
    forged: bool = False
    """With a checksum that is right: only then may it say something else."""


@dataclass(frozen=True)
class CommitMaps(Target):
    name = "commit_map"
    decode: Callable[[int, str | None], Ranges | None] = decode_completed

    def make(self, rng: Random) -> Metadata:
        committed = rng.choice((0, 1, 300, 2**31, 2**62, 2**63 - 1))
        if rng.random() < 0.3:
            payload = b"".join(rng.choice(_VARINTS) for _ in range(rng.randrange(7)))
            crc = zlib.crc32(payload, zlib.crc32(committed.to_bytes(8, "big", signed=True))).to_bytes(
                4, "big"
            )
            text = "tailrace1:" + base64.urlsafe_b64encode(crc + payload).decode()
            return Metadata(committed, text, (), good=False, forged=True)
        ranges = completed_ranges(rng, committed)
        text = encode_completed(committed, ranges)
        if rng.random() < 0.2:
            return Metadata(committed, text, ranges, good=True)
        if rng.random() < 0.2:
            return Metadata(committed ^ (1 << rng.randrange(62)), text, (), good=False)
        changed = mutated_bytes(rng, text.encode(), _TEXT_TOKENS).decode(errors="replace")
        return Metadata(committed, changed, ranges, good=False)

    def check(self, case: Metadata) -> Outcome:
        found = self.decode(case.committed, case.text)
        if case.good:
            expect((found or ()) == case.ranges, "another map than was written", found)
            expect(len(case.text) <= MAX_METADATA_BYTES and case.text.isascii(), "text", case.text)
        if found is None:
            return Outcome.REFUSED
        expect(case.forged or found == case.ranges, "took a damaged map", found)
        position = case.committed
        for first, end in found:
            expect(position < first < end, "ranges out of order", found)
            position = end
        expect(
            self.decode(case.committed, encode_completed(case.committed, found)) == found,
            "not the same",
            found,
        )
        return Outcome.ACCEPTED


@dataclass(frozen=True)
class Handover:
    start: int
    steps: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Handovers(Target):
    """One worker's commit as the next one reads it: nothing complete is done again, nothing incomplete is lost."""

    name = "handover"
    share = 0.5
    decode: Callable[[int, str | None], Ranges | None] = decode_completed

    def make(self, rng: Random) -> Handover:
        start, offset = rng.choice((0, 7, 2**40)), 0
        steps: list[tuple[str, int]] = []
        for _ in range(rng.randrange(60)):
            kind = rng.random()
            if kind < 0.5:
                offset += rng.choice((0, 1, 1, 1, 2, 200))
                steps.append(("register", start + offset))
            elif kind < 0.95:
                steps.append(("complete", start + rng.randrange(offset + 2)))
            else:
                steps.append(("advance", start + offset + rng.randrange(3)))
        return Handover(start, tuple(steps))

    def check(self, case: Handover) -> Outcome:
        offsets = PartitionOffsets(case.start)
        open_, done = set(), set()
        for step, offset in case.steps:
            if step == "register" and offsets.register(offset):
                open_.add(offset)
            elif step == "complete" and offsets.complete(offset):
                open_.discard(offset)
                done.add(offset)
            elif step == "advance":
                offsets.advance(offset)
        committed, text = offsets.committable()
        expect(
            all(offset >= committed for offset in open_),
            "the commit passes an incomplete offset",
            committed,
            open_,
        )
        successor = PartitionOffsets(committed, self.decode(committed, text) or ())
        again = {
            offset for offset in sorted(open_ | done) if offset >= committed and successor.register(offset)
        }
        expect(again == open_, "the successor delivers others than the incomplete ones", again, open_)
        return Outcome.ACCEPTED


Record = tuple[bytes | None, bytes | None, tuple[tuple[bytes, bytes | None], ...]]


@dataclass(frozen=True)
class Fetched:
    data: bytes
    records: tuple[Record, ...] | None
    """What it holds, if nothing was changed since."""


@dataclass(frozen=True)
class HeaderNames(Target):
    """A fetch with header names of any bytes: only the names change; damage stays as visible as it was."""

    name = "header_name"
    share = 0.5
    repair: Callable[[bytes], bytes] = with_readable_header_names

    def make(self, rng: Random) -> Fetched:
        records: list[Record] = []
        data = b""
        for _ in range(rng.randrange(1, 3)):
            builder: Any = BatchBuilder(2, rng.choice((0, 0, 1)), 0, -1, -1, -1, 1 << 20)
            for index in range(rng.randrange(1, 4)):
                part = tuple(
                    (
                        rng.choice((b"a", b"\xff\xfe", "é".encode(), b"\xc3", b"")),
                        rng.choice((b"", None, b"\xff" * 9)),
                    )
                    for _ in range(rng.randrange(4))
                )
                key, value = rng.choice((None, b"k")), rng.choice((None, b"", b"{}", b"\xff" * 200))
                builder.append(
                    index, 1_700_000_000_000, key, value, [(RawName(name), each) for name, each in part]
                )
                records.append((key, value, part))
            data += bytes(builder.build())
        if rng.random() < 0.4:
            return Fetched(data, tuple(records))
        return Fetched(mutated_bytes(rng, data), None)

    def check(self, case: Fetched) -> Outcome:
        repaired = self.repair(case.data)
        if case.records is None:
            before, after = sound_batches(case.data), sound_batches(repaired)
            expect(before == after, "a damaged batch became sound, or a sound one damaged", before, after)
            return Outcome.REFUSED if False in before else Outcome.ACCEPTED
        expect(self.repair(repaired) == repaired, "the second repair changes something", repaired)
        found = [
            (record.key, record.value, tuple((name.encode(), value) for name, value in record.headers))
            for batch in split_batches(repaired)
            for record in DefaultRecordBatch(batch)
        ]
        wanted = [(key, value, tuple((readable(n), v) for n, v in part)) for key, value, part in case.records]
        expect(found == wanted, "other records than were written", found, wanted)
        return Outcome.ACCEPTED


def readable(name: bytes) -> bytes:
    try:
        name.decode()
    except UnicodeDecodeError:
        return bytes(byte if byte < 128 else 63 for byte in name)
    return name


def split_batches(data: bytes) -> list[bytearray]:
    """The whole batches that a fetch begins with."""
    batches = []
    while len(data) >= 61:
        end = 12 + int.from_bytes(data[8:12], "big", signed=True)
        if not 61 <= end <= len(data):
            break
        batches.append(bytearray(data[:end]))
        data = data[end:]
    return batches


def sound_batches(data: bytes) -> list[bool]:
    """Tell of each batch whether its checksum is right."""
    return [batch[16] == 2 and DefaultRecordBatch(batch).validate_crc() for batch in split_batches(data)]
