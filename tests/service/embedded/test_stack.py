"""The embedded pair answers, is found, and never outlives the process that started it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis.asyncio as redis
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, OffsetAndMetadata, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from service.embedded import announcements
from service.embedded.stack import EmbeddedStack
from service.errors import DependencyError

PARENT = """
import asyncio, json, sys
from service.embedded.stack import EmbeddedStack
async def main():
    async with EmbeddedStack() as stack:
        print(json.dumps({"pids": stack.pids, "supervisor": stack._process.pid}), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def test_pair_serves_what_the_service_needs() -> None:
    async with EmbeddedStack() as stack:
        assert await _round_trip(stack.kafka_bootstrap) == (0, "m" * 4_000)
        client = redis.Redis.from_url(stack.redis_url)
        try:
            assert await client.eval(
                "return redis.call('XADD', KEYS[1], '*', 'event', ARGV[1])", 1, "log", "{}"
            )
            assert (await client.config_get("save"))["save"] == ""
        finally:
            await client.aclose()
        pids = list(stack.pids.values())
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def _round_trip(bootstrap: str) -> tuple[int, str]:
    """Topic, idempotent send, group read, commit with metadata; what the admin client reads back."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    await producer.start()
    consumer = AIOKafkaConsumer(
        "t", bootstrap_servers=bootstrap, group_id="g", enable_auto_commit=False, auto_offset_reset="earliest"
    )
    try:
        await admin.create_topics([NewTopic("t", 1, 1, topic_configs={"cleanup.policy": "compact,delete"})])
        await producer.send_and_wait("t", b"value", key=b"key", headers=[("traceparent", b"00")])
        await consumer.start()
        record = await consumer.getone()
        assert (record.key, record.value, record.headers) == (b"key", b"value", (("traceparent", b"00"),))
        partition = TopicPartition("t", 0)
        await consumer.commit({partition: OffsetAndMetadata(record.offset, "m" * 4_000)})
        offsets = await admin.list_consumer_group_offsets("g")
        return offsets[partition].offset, offsets[partition].metadata
    finally:
        await consumer.stop()
        await producer.stop()
        await admin.close()


async def test_memory_only_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    async with EmbeddedStack(announce=False) as stack:
        await _round_trip(stack.kafka_bootstrap)
        assert list((tmp_path / "scratch").iterdir()) == []
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_running_pair_is_found_and_forgotten() -> None:
    assert announcements.find_running() is None
    async with EmbeddedStack() as stack:
        found = announcements.find_running()
        assert found is not None
        assert (found.kafka_bootstrap, found.redis_url) == (stack.kafka_bootstrap, stack.redis_url)
    assert announcements.find_running() is None


def test_stale_file_of_a_reused_pid_is_ignored() -> None:
    path = announcements.announce(
        announcements.Endpoints("127.0.0.1:1", "redis://127.0.0.1:2/0", os.getpid(), 1)
    )
    assert announcements.find_running() is None
    assert not path.exists()


def test_runtime_folder_that_cannot_be_made_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert announcements.runtime_folder() == tmp_path / f"tailrace-{os.getuid()}"


async def test_pair_that_cannot_be_announced_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tailrace").mkdir(mode=0o755)
    stack = EmbeddedStack()
    with pytest.raises(DependencyError, match=r"cannot be announced: .* mode 0700"):
        async with stack:
            pytest.fail("announced in a folder that others can read")
    assert not any(_runs(pid) for pid in stack.pids.values())


def test_supervisor_whose_parent_is_gone_ends_quietly(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = _root() / "service/embedded/supervisor.py"
    spec = json.dumps({"servers": {}, "start_timeout_s": 1, "scratch": str(tmp_path / "scratch")})
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(script), spec],
        stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_runtime_folder_readable_by_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tailrace").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="0700"):
        announcements.runtime_folder()
    assert announcements.find_running() is None


async def test_two_pairs_can_run_at_once() -> None:
    async with EmbeddedStack() as first, EmbeddedStack() as second:
        assert first.kafka_port != second.kafka_port
        assert first.redis_port != second.redis_port


async def test_taken_port_is_one_clear_error() -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(
            DependencyError,
            match=rf"embedded redis cannot have port {port} on 127.0.0.1: Address already in use",
        ):
            async with EmbeddedStack(redis_port=port):
                pytest.fail("started on a port that was taken")
    finally:
        server.close()


async def test_death_of_a_server_is_reported() -> None:
    async with EmbeddedStack() as stack:
        os.kill(stack.pids["redis"], signal.SIGKILL)
        assert "embedded redis ended with code -9" in await stack.failed


@pytest.mark.parametrize("victim", ["parent", "supervisor"])
def test_no_orphan_after_kill_dash_nine(victim: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=_root()) as parent:
        assert parent.stdout is not None
        told = json.loads(parent.stdout.readline())
        pids = [*told["pids"].values(), told["supervisor"]]
        os.kill(parent.pid if victim == "parent" else told["supervisor"], signal.SIGKILL)
        _until(lambda: not any(_runs(pid) for pid in pids))
        parent.kill()


def _runs(pid: int) -> bool:
    return announcements.start_ticks(pid) is not None


def _until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """There is no event for the death of another process's child."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "condition never became true"
        time.sleep(0.02)


def _root() -> Path:
    return Path(__file__).resolve().parents[3]
