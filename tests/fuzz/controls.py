"""Each target with a check taken out of the code under test: fuzzing has to find that it is gone."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from kernels.errors import ModelFileError
from kernels.model_config import ModelConfig
from kernels.weights.gguf_file import read_gguf_metadata
from kernels.weights.hugging_face import read_config
from kernels.weights.safetensors_folder import SafetensorsFolder
from service.errors import JobError
from service.ingest.header_names import with_readable_header_names
from service.ingest.offsets import Ranges, decode_completed
from service.pipelines.job_file import Line, read_lines
from service.stream.assemble import Fed, StreamAssembler
from service.text import Detokenizer
from service.wire import (
    DeadLetter,
    Delta,
    Event,
    Job,
    Result,
    parse_dead_letter,
    parse_event,
    parse_job,
    parse_result,
)
from tests.fuzz.target import Target
from tests.fuzz.targets.commits import CommitMaps, Handovers, HeaderNames
from tests.fuzz.targets.jobs import BatchFiles, BatchLines, Jobs
from tests.fuzz.targets.models import Configs, GgufFiles, Safetensors
from tests.fuzz.targets.records import DeadLetters, Events, Results
from tests.fuzz.targets.streams import Assemblers, Readers
from tests.fuzz.targets.text import Detokenizers


def job_takes_the_last_of_two_values(value: bytes | None, **record: Any) -> Job:
    return parse_job(_with_the_last_values(value), **record)


def _with_the_last_values(value: bytes | None) -> bytes | None:
    try:
        return orjson.dumps(orjson.loads(value or b""))
    except (orjson.JSONDecodeError, TypeError):
        return value


def line_with_its_own_names_in_errors(value: bytes | None, **record: Any) -> Job:
    """Repeats a field's name as the line writes it, with half a surrogate pair or empty."""
    try:
        return parse_job(value, **record)
    except JobError as error:
        if error.code == "unknown_field" and error.field:
            error.field = error.field.removeprefix("body.").replace("?", "\ud800").strip('"')
        raise


def file_numbers_only_lines_that_are_not_blank(*args: Any, **options: Any) -> list[Line]:
    lines = list(read_lines(*args, **options))
    for number, line in enumerate(lines, start=1):
        line.number = number
    return lines


def result_with_what_json_cannot_write(data: bytes) -> Result:
    """Lets a number that is not finite through."""
    result = parse_result(data)
    for part in (result.metadata or {}).values():
        if isinstance(part, list):
            part[:1] = [float("nan")]
    return result


def event_that_counts_from_one(data: bytes) -> Event:
    event = parse_event(data)
    return replace(event, seq=event.seq + 1) if isinstance(event, Delta) else event


def dead_letter_by_name(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> DeadLetter:
    """Takes every header of ours, wherever it stands."""
    ours = [header for header in headers if header[0].startswith("tailrace-dl-")]
    return parse_dead_letter(key, value, [*(h for h in headers if h not in ours), *ours])


def map_without_its_offset(committed: int, metadata: str | None) -> Ranges | None:
    """Reads a map against any offset."""
    found = decode_completed(committed, metadata)
    for distance in [1 << bit for bit in range(62)] if found is None else []:
        found = decode_completed(committed ^ distance, metadata)
        if found is not None:
            return tuple((first - (committed ^ distance) + committed, end) for first, end in found)
    return found


def map_that_begins_one_early(committed: int, metadata: str | None) -> Ranges | None:
    found = decode_completed(committed, metadata)
    return found and tuple((max(committed + 1, first - 1), end) for first, end in found)


def names_with_a_new_checksum(data: bytes) -> bytes:
    """Makes a damaged batch look sound."""
    from aiokafka.record.util import calc_crc32c

    repaired = with_readable_header_names(data)
    if len(repaired) < 61 or 12 + int.from_bytes(repaired[8:12], "big", signed=True) != len(repaired):
        return repaired
    return repaired[:17] + struct.pack(">I", calc_crc32c(repaired[21:])) + repaired[21:]


class TokenwiseDetokenizer(Detokenizer):
    """Decodes every token by itself."""

    __slots__ = ()

    def _feed_one(self, token_id: int) -> str:
        self._decoder.reset()
        return super()._feed_one(token_id)


class TrustingAssembler(StreamAssembler):
    """Goes on over missing events of an attempt, and believes the text to be whole."""

    def feed(self, event: Event) -> Fed:
        if event.epoch == self.epoch and event.seq > self.next_seq:
            self.next_seq = event.seq
        return super().feed(event)

    def problems(self) -> list[str]:
        return [] if self.end is not None else ["no end event"]


def gguf_of_bytes_that_may_be_missing(path: Path) -> dict[str, Any]:
    try:
        return read_gguf_metadata(path)
    except ModelFileError as error:
        if "truncated" in str(error):
            raise IndexError(str(error)) from error
        raise


class ForgetfulFolder(SafetensorsFolder):
    """Loses the first tensor of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.shapes.pop(next(iter(self.shapes), ""), None)


def config_of_any_depth(folder: Path) -> ModelConfig:
    try:
        return read_config(folder)
    except ModelFileError as error:
        if isinstance(error.__cause__, RecursionError):
            raise error.__cause__ from None
        raise


CONTROLS: dict[str, Target] = {
    target.name: target
    for target in (
        Jobs(parse=job_takes_the_last_of_two_values),
        BatchLines(parse=line_with_its_own_names_in_errors),
        BatchFiles(read=file_numbers_only_lines_that_are_not_blank),
        Results(parse=result_with_what_json_cannot_write),
        Events(parse=event_that_counts_from_one),
        DeadLetters(parse=dead_letter_by_name),
        CommitMaps(decode=map_without_its_offset),
        Handovers(decode=map_that_begins_one_early),
        HeaderNames(repair=names_with_a_new_checksum),
        Detokenizers(detokenizer=TokenwiseDetokenizer),
        Readers(assembler=TrustingAssembler),
        Assemblers(assembler=TrustingAssembler),
        GgufFiles(read=gguf_of_bytes_that_may_be_missing),
        Safetensors(open=ForgetfulFolder),
        Configs(read=config_of_any_depth),
    )
}
"""By name of the target."""
