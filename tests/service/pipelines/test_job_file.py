"""Lines of a file of jobs, rows that name their line, and ids under which failed lines are run again."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from service.pipelines.documents import read_document
from service.pipelines.job_file import Line, _refused, _retry_id, read_lines
from service.wire.limits import ID_PATTERN


def test_retried_ids_of_full_length_that_differ_at_the_end_do_not_collide() -> None:
    first, second = "x" * 120 + "aaaaaaaa", "x" * 120 + "bbbbbbbb"
    ids = {_retry_id(job_id, tries) for job_id in (first, second) for tries in (2, 3, 1_000)}
    assert len(ids) == 6
    assert all(re.fullmatch(ID_PATTERN, job_id) for job_id in ids)
    assert _retry_id("short", 2) == "short:r2"


def lines_of(data: bytes, max_bytes: int = 1000) -> list[Line]:
    return list(read_lines(io.BytesIO(data), model="m", max_bytes=max_bytes))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_files_of_any_editor_are_read(mark: bytes, end: bytes) -> None:
    rows = [json.dumps({"id": name, "prompt": "x"}).encode() for name in ("a", "b")]
    data = mark + end.join([rows[0], b"", rows[1]])
    for whole in (data, data + end):
        lines = lines_of(whole, max_bytes=len(rows[0]))
        assert [(line.number, line.value, line.error) for line in lines] == [
            (1, rows[0], None),
            (3, rows[1], None),
        ]


def test_document_begins_with_its_text_and_not_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe")
    assert read_document(tmp_path / "a.txt") == "Grüße"


def batch_line(custom_id: Any, **more: Any) -> bytes:
    line = {"custom_id": custom_id, "url": "/v1/chat/completions", "body": {"messages": []}} | more
    return json.dumps(line).encode()


@pytest.mark.parametrize("custom_id", ["request-1", "a b", "Ä-é", "path/to/file.txt", "x" * 600])
@pytest.mark.parametrize(
    "fault", [{}, {"url": "/v2"}, {"url": 5}, {"body": []}, {"body": {"tools": [1]}}, {"x": 1}]
)
def test_every_refused_row_of_a_batch_carries_its_custom_id(custom_id: str, fault: dict[str, Any]) -> None:
    (line,) = lines_of(batch_line(custom_id, **fault))
    assert line.error is not None
    row = _refused(line, line.error)
    assert (row["custom_id"], row["response"]) == (custom_id, None)
    assert row["error"]["message"]


def test_second_line_with_a_custom_id_is_refused_by_that_name() -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    first, second = lines_of(batch_line("a b", body=body) + b"\n" + batch_line("a b", body=body))
    assert first.job is not None
    assert second.error is not None
    assert second.error.message.startswith("custom_id: 'a b' is already on line 1")
    assert _refused(second, second.error)["custom_id"] == "a b"
