"""The output file survives crashes and is resumed by content, never by position."""

from pathlib import Path

import orjson
import pytest

from service.errors import SettingsError
from service.pipelines.rows import RowFile, row_key


def _lines(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_rows_are_on_disk_as_they_end_not_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RowFile(path) as rows:
        rows.append({"key": "a", "status": "completed"})
        assert _lines(path) == [{"key": "a", "status": "completed"}]


def test_resume_skips_finished_rows_and_drops_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"key":"a","status":"completed"}\n{"key":"b","stat')
    with RowFile(path) as rows:
        assert list(rows.kept) == ["a"]
        rows.append({"key": "b", "status": "completed"})
    assert [row["key"] for row in _lines(path)] == ["a", "b"]


def test_failed_rows_are_made_again_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"key":"a","status":"failed"}\n{"key":"b","status":"completed"}\n')
    with RowFile(path) as rows:
        assert list(rows.kept) == ["a", "b"]
    with RowFile(path, redo=lambda row: row["status"] != "completed") as rows:
        assert list(rows.kept) == ["b"]
        assert rows.attempts == {"a": 1, "b": 1}
        rows.append({"key": "a", "status": "completed", "tries": 2})
    assert _lines(path) == [
        {"key": "a", "status": "completed", "tries": 2},
        {"key": "b", "status": "completed"},
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_retry_does_not_forget_how_often_a_row_was_tried(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    failed = b'{"key":"a","status":"failed","tries":3}\n'
    path.write_bytes(failed)
    with RowFile(path, redo=lambda row: row["status"] != "completed"):
        assert path.read_bytes() == failed
    with RowFile(path, redo=lambda row: row["status"] != "completed") as rows:
        assert rows.attempts == {"a": 3}


def test_crash_between_the_new_row_and_the_end_leaves_the_new_one_standing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"key":"a","status":"failed"}\n{"key":"a","status":"completed","tries":2}\n')
    with RowFile(path, redo=lambda row: row["status"] != "completed") as rows:
        assert rows.kept["a"]["status"] == "completed"
    assert [row["status"] for row in _lines(path)] == ["completed"]


def test_foreign_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "precious.jsonl"
    path.write_bytes(b'{"mine":1}\n')
    with pytest.raises(SettingsError, match="not an output of this command"), RowFile(path):
        pass
    assert path.read_bytes() == b'{"mine":1}\n'


def test_checkpoint_is_not_reused_after_the_prompt_or_model_changed() -> None:
    base = {"input": "text", "prompt": "Summarize", "model": "m", "parameters": {"max_tokens": 5, "seed": 1}}
    keys = {row_key(**base)}
    keys |= {row_key(**(base | {name: "other"})) for name in base}
    assert len(keys) == 5
    assert row_key(**base) == row_key(**dict(reversed(base.items())))


def test_unwritable_output_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be written"), RowFile(tmp_path / "no" / "out.jsonl"):
        pass
    with pytest.raises(SettingsError, match="cannot be written: Is a directory"), RowFile(tmp_path):
        pass
