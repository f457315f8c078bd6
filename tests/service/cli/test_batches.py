"""submit, summarize and dlq: streaming, resumable, one bad row never ends a run."""

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.service.cli.conftest import ROOT, Service, Tailrace, command


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _job(job_id: str, prompt: str = "p", **fields: Any) -> str:
    return json.dumps({"id": job_id, "prompt": prompt, "max_tokens": 6, **fields})


def test_one_bad_row_does_not_kill_the_run(tailrace: Tailrace, tmp_path: Path) -> None:
    lines = [
        _job("b1-1"),
        "not json",
        _job("b1-2", top_p=7),
        "",
        _job("b1-1", "again"),
        _job("b1-3", model="no"),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    ended = tailrace("submit", str(tmp_path / "in.jsonl"), "--wait", "-o", str(tmp_path / "out.jsonl"))
    assert ended.returncode == 1
    by_line = {row["line"]: row for row in _rows(tmp_path / "out.jsonl")}
    assert {number: row["status"] for number, row in by_line.items()} == {
        1: "completed", 2: "rejected", 3: "rejected", 5: "rejected", 6: "rejected",
    }  # fmt: skip
    assert by_line[3]["error"]["field"] == "top_p"
    assert by_line[5]["error"]["code"] == "duplicate_id"
    assert "no" in by_line[6]["error"]["message"]


def test_run_is_resumed_by_content_and_rows_are_not_repeated(tailrace: Tailrace, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(_job(f"b2-{number}") for number in range(8)))
    arguments = ("submit", str(source), "--wait", "-o", str(output))
    assert tailrace(*arguments).returncode == 0
    whole = {row["id"]: row["choices"] for row in _rows(output)}
    kept = output.read_text().splitlines()[:3]
    output.write_text("\n".join(kept) + '\n{"id":"b2-')  # as after a crash: five rows lost, one torn
    source.write_text("\n".join(reversed(source.read_text().splitlines())))
    again = tailrace(*arguments)
    assert again.returncode == 0
    assert "8 completed (3 of them in an earlier run)" in again.stderr
    assert output.read_text().splitlines()[:3] == kept
    assert {row["id"]: row["choices"] for row in _rows(output)} == whole


def test_retry_failed_runs_only_those_again(tailrace: Tailrace, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([_job("b3-1"), _job("b3-2", deadline=0.001)]))
    arguments = ("submit", str(source), "--wait", "-o", str(output))
    assert tailrace(*arguments).returncode == 1
    first = {row["id"]: row for row in _rows(output)}
    assert first["b3-2"]["status"] == "expired"
    assert tailrace(*arguments).returncode == 1
    assert {row["id"]: row for row in _rows(output)} == first
    assert tailrace(*arguments, "--retry-failed").returncode == 1
    second = {row["id"]: row for row in _rows(output)}
    assert second["b3-1"] == first["b3-1"]
    assert second["b3-2"]["tries"] == 2


def test_openai_batch_lines_come_back_as_openai_batch_lines(tailrace: Tailrace) -> None:
    body = {"model": "deterministic", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    ids = ["b4-1", "b4 2", "Ä-é", "path/to/file.txt"]
    lines = [{"custom_id": i, "method": "POST", "url": "/v1/chat/completions", "body": body} for i in ids]
    ended = tailrace("submit", "-", "--wait", stdin="\r\n".join(map(json.dumps, lines)))
    rows = {row["custom_id"]: row for row in map(json.loads, ended.stdout.splitlines())}
    assert (ended.returncode, rows.keys()) == (0, set(ids))
    for row in rows.values():
        assert row["error"] is None
        choice = row["response"]["body"]["choices"][0]
        assert choice["message"]["content"] == row["choices"][0]["text"]


def test_refused_batch_line_on_the_topic_is_filed_under_the_id_made_from_its_custom_id(
    tailrace: Tailrace, service: Service
) -> None:
    line = {"custom_id": "refused / 1", "url": "/v1/completions", "body": {"prompt": "p", "n": 99}}
    job_id = "refused---1:" + hashlib.sha256(b"refused / 1").hexdigest()[:32]
    _publish_raw(service, b"any key", json.dumps(line).encode())
    for name in (job_id, "refused / 1"):
        assert json.loads(tailrace("tail", name, "--json").stdout.splitlines()[-1])["status"] == "rejected"


def test_a_job_under_the_id_of_another_job_is_reported(tailrace: Tailrace) -> None:
    assert tailrace("submit", "-", "--wait", stdin=_job("b5")).returncode == 0
    ended = tailrace("submit", "-", "--wait", stdin=_job("b5", "another prompt"))
    assert json.loads(ended.stdout)["error"]["code"] == "duplicate_id"
    same = tailrace("submit", "-", "--wait", stdin=_job("b5"))
    assert json.loads(same.stdout)["status"] == "completed"


def test_submit_without_wait_only_publishes(tailrace: Tailrace) -> None:
    ended = tailrace("submit", "-", stdin=_job("b6") + "\n{}\n")
    assert ended.returncode == 1
    assert ended.stdout == "1 jobs published on tailrace.jobs\n"
    assert "line 2" in ended.stderr
    assert tailrace("tail", "b6").returncode == 0


def test_summaries_of_long_and_short_documents(tailrace: Tailrace, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.txt").write_text("Short text.")
    (documents / "b.md").write_text("A sentence about something. " * 300)
    (documents / "c.txt").write_bytes(b"\xff\xfe broken")
    (documents / "d.txt").write_text(" \n")
    (documents / "e.bin").write_text("not a document")
    output = tmp_path / "out.jsonl"
    arguments = ("summarize", str(documents), "-o", str(output), "--max-words", "20")
    ended = tailrace(*arguments)
    assert ended.returncode == 1
    rows = {Path(row["path"]).name: row for row in _rows(output)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "a.txt": "completed", "b.md": "completed", "c.txt": "failed", "d.txt": "failed",
    }  # fmt: skip
    assert rows["c.txt"]["error"]["code"] == "invalid_utf8"
    assert rows["a.txt"]["summary"]
    assert rows["a.txt"]["num_jobs"] == 1
    assert rows["b.md"]["num_jobs"] > 2
    assert rows["b.md"]["stream_verified"] is True
    before = output.read_text()
    assert "4 of them in an earlier run" in tailrace(*arguments).stderr
    assert output.read_text() == before
    assert tailrace(*arguments, "--limit", "2").returncode == 0


def test_dead_letters_are_listed_and_replayed(tailrace: Tailrace, service: Service) -> None:
    _publish_raw(service, b"dlq-key", b'{"id": broken')
    listed = json.loads(tailrace("tail", "dlq-key", "--json").stdout.splitlines()[-1])
    assert listed["status"] == "failed"
    (letter,) = [
        each
        for each in json.loads(tailrace("dlq", "list", "--json").stdout)["dead_letters"]
        if each["key"] == "dlq-key"
    ]
    assert (letter["code"], letter["bytes"]) == ("invalid_json", 13)
    replayed = tailrace("dlq", "replay", letter["place"])
    assert (replayed.returncode, replayed.stdout) == (0, "1 dead letters published again on tailrace.jobs\n")
    missing = tailrace("dlq", "replay", "0:999999")
    assert (missing.returncode, "no dead letter at 0:999999" in missing.stderr) == (1, True)


def _publish_raw(service: Service, key: bytes, value: bytes) -> None:
    code = (
        "import asyncio, sys\nfrom aiokafka import AIOKafkaProducer\n"
        "async def main():\n"
        f"    async with AIOKafkaProducer(bootstrap_servers={service.kafka!r}) as producer:\n"
        f"        await producer.send_and_wait('tailrace.jobs', {value!r}, key={key!r})\n"
        "asyncio.run(main())"
    )
    subprocess.run([*command()[:1], "-c", code], check=True, timeout=60, env=dict(os.environ), cwd=ROOT)
