"""The README's reader ends with the whole text or an error, whatever happens to the stream."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.redis import RedisServer
from tests.support.streams import COMPLETED, open_stream, running_publisher

pytestmark = pytest.mark.redis

README = Path(__file__).resolve().parents[2] / "README.md"
JOB = "readme-1"
WHOLE = "completed, proven whole: True"
LIMIT_S = 30.0


class Reading:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._shown = ""

    async def has_shown(self, text: str) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            while text not in self._shown:
                piece = await self._process.stdout.read(1)
                assert piece, self._shown
                self._shown += piece.decode()

    async def end(self) -> tuple[int, str, str]:
        """Exit code, what it printed, and its error."""
        async with asyncio.timeout(LIMIT_S):
            out, error = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, self._shown + out.decode(), error.decode()


@asynccontextmanager
async def reading(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Reading]:
    code = README.read_text().split("```python\n")[2].split("```")[0]
    script = tmp_path / "reader.py"
    script.write_text(code.replace("redis://127.0.0.1:6379/0", redis_server.url))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "utf8", str(script),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Reading(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_a_redis_that_forgets_everything_before_another_worker_takes_over(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with running_publisher(redis_server.url) as first, running_publisher(redis_server.url) as second:
        stream = await open_stream(first, JOB)
        async with reading(redis_server, tmp_path) as reader:
            for token in range(8):
                stream.delta(0, f"{token} ", (token,))
                assert await stream.flushed()
            await reader.has_shown("7 ")
            redis_server.flush()
            stream = await open_stream(second, JOB)
            for token in range(4):
                stream.delta(0, f"{token} ", (token,))
                assert await stream.flushed()
            assert await stream.end(COMPLETED)
            code, shown, _ = await reader.end()
    assert code == 0
    assert shown.endswith(f"\n{WHOLE}\n"), "the attempts' epochs differ, so the text begins anew"


async def test_a_redis_that_forgets_everything_while_its_worker_continues(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        stream = await open_stream(publisher, JOB)
        async with reading(redis_server, tmp_path) as reader:
            stream.delta(0, "before ", (1,))
            assert await stream.flushed()
            await reader.has_shown("before ")
            redis_server.flush()
            stream.delta(0, "after", (2,))
            assert await stream.flushed()
            assert await stream.end(COMPLETED)
            code, shown, _ = await reader.end()
    assert (code, shown) == (0, f"before after\n{WHOLE}\n")


@pytest.mark.parametrize("lost", ["everything", "the log"])
async def test_a_stream_that_is_lost_for_good_ends_the_reader_with_an_error(
    redis_server: RedisServer, tmp_path: Path, lost: str
) -> None:
    async with running_publisher(redis_server.url) as publisher:
        stream = await open_stream(publisher, JOB)
        stream.delta(0, "before ", (1,))
        assert await stream.flushed()
        async with reading(redis_server, tmp_path) as reader:
            await reader.has_shown("before ")
            if lost == "everything":
                redis_server.flush()
            else:
                redis_server.client().delete(f"tailrace:{{{JOB}}}:log")
            code, _, error = await reader.end()
    assert code == 1
    assert "RuntimeError: Redis has lost the stream" in error


async def test_the_same_id_in_another_database_is_another_stream(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    other_url = redis_server.url.replace("/0", "/1")
    async with running_publisher(redis_server.url) as here, running_publisher(other_url) as there:
        ours = await open_stream(here, JOB)
        theirs = await open_stream(there, JOB)
        async with reading(redis_server, tmp_path) as reader:
            ours.start()
            assert await ours.flushed()
            for token in range(8):
                for stream, text in ((ours, "ours "), (theirs, "theirs ")):
                    stream.delta(0, text, (token,))
                    assert await stream.flushed()
            assert await theirs.end(COMPLETED)
            assert await ours.end(COMPLETED)
            code, shown, _ = await reader.end()
    assert (code, shown) == (0, "ours " * 8 + f"\n{WHOLE}\n")
