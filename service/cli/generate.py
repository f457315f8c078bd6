"""`tailrace generate`, `tail` and `cancel`: shows one job's stream."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
import typer
from aiokafka.errors import KafkaError

from service.cli.console import note, print_json_line, run
from service.client import Client, client_settings
from service.client.lookup import Seen, other_job, seen_before
from service.errors import DependencyError, JobError, SettingsError
from service.stream.assemble import StreamAssembler
from service.stream.reader import Gap, Item, Verdict
from service.wire import Delta, End, Result, Start, encode_event, job_id_of, parse_job
from service.wire.limits import MAX_CUSTOM_ID_CHARS

HINT_AFTER_S = 5.0
LOOKUP_TIMEOUT_S = 20.0
CANCEL_TIMEOUT_S = 5.0
"""How long Ctrl-C waits for a Redis that is away."""


def make_job(
    prompt: str, *, system: str | None, raw: bool, job_id: str | None, seed: int | None, model: str | None,
    stop: list[str], **parameters: Any,
) -> dict[str, Any]:  # fmt: skip
    """Make the job from the command's options. Raises SettingsError for what no worker would accept."""
    if prompt == "-":
        prompt = _read_prompt()
    job: dict[str, Any] = {"id": f"gen-{secrets.token_hex(8)}" if job_id is None else job_id, **parameters}
    if raw:
        if system is not None:
            raise SettingsError("--system needs a chat template; leave out --raw")
        job["prompt"] = prompt
    else:
        turns = [{"role": "system", "content": system}] if system is not None else []
        job["messages"] = [*turns, {"role": "user", "content": prompt}]
    options = (("seed", seed), ("model", model), ("stop", stop or None))
    job |= {name: value for name, value in options if value is not None}
    try:
        parse_job(orjson.dumps(job), key=None, timestamp_ms=int(time.time() * 1000))
    except JobError as error:
        raise SettingsError(error.message) from error
    except orjson.JSONEncodeError as error:
        raise SettingsError("prompt and options must be valid UTF-8") from error
    return job


def _read_prompt() -> str:
    """Read standard input as UTF-8, whatever encoding the locale names."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as bad:
        raise SettingsError(
            f"prompt: byte 0x{bad.object[bad.start]:02x} at offset {bad.start} of standard input "
            "is not valid UTF-8"
        ) from bad


def generate(job: dict[str, Any], *, as_json: bool) -> None:
    """Publish a job and print its stream; exit code 1 unless it completes. Raises DependencyError and JobError."""
    if not run(_generate(job, as_json=as_json)):
        raise typer.Exit(1)


async def _generate(job: dict[str, Any], *, as_json: bool) -> bool:
    job_id, value = job["id"], orjson.dumps(job)
    async with Client(client_settings()) as client:
        seen = await seen_before(client.redis, client.settings.namespace, job_id, value)
        if seen is Seen.OTHER_JOB:
            raise other_job(job_id)
        try:
            if seen is Seen.NEVER:
                await client.publish(job_id, value)
            return await follow(client, job_id, as_json=as_json)
        except asyncio.CancelledError:
            await _cancel_interrupted(client, job_id)
            raise


async def _cancel_interrupted(client: Client, job_id: str) -> None:
    try:
        async with asyncio.timeout(CANCEL_TIMEOUT_S):
            await client.cancel(job_id)
    except (DependencyError, TimeoutError):
        note(f"\n{job_id} may go on: Redis does not answer, so it could not be cancelled")
    else:
        note(f"\ncancelled {job_id}")


def tail(job_id: str, *, as_json: bool) -> None:
    """Print a job's stream; exit code 1 unless it completes. Raises SettingsError and DependencyError."""
    if not run(_tail(_id_of(job_id), as_json=as_json)):
        raise typer.Exit(1)


async def _tail(job_id: str, *, as_json: bool) -> bool:
    async with Client(client_settings(), kafka=False) as client:
        return await follow(client, job_id, as_json=as_json)


def cancel(job_id: str, *, wait: bool) -> None:
    """Cancel a job. Raises SettingsError and DependencyError."""
    if not run(_cancel(_id_of(job_id), wait=wait)):
        raise typer.Exit(1)


async def _cancel(job_id: str, *, wait: bool) -> bool:
    async with Client(client_settings(), kafka=False) as client:
        await client.cancel(job_id)
        print(f"cancellation of {job_id} requested")
        if not wait:
            return True
        async with aclosing(client.stream(job_id)) as items:
            async for item in _hinting(client, job_id, items):
                if isinstance(item, Verdict):
                    print(f"{job_id} ended: {item.status}")
        return True


async def follow(client: Client, job_id: str, *, as_json: bool) -> bool:
    """Print the stream until it ends; return True when the job completed and its stream is proven whole."""
    printer = _Json() if as_json else _Text()
    good = False
    async with aclosing(client.stream(job_id, StreamAssembler(job_id))) as items:
        async for item in _hinting(client, job_id, items):
            good = printer.show(item)
    return good


async def _hinting(client: Client, job_id: str, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    """Yield the same items; when the first takes long, say why there may be none.

    Ends with a verdict of its own where the job has a result but Redis no longer knows the job.
    """
    first = asyncio.ensure_future(anext(items))
    hint = asyncio.create_task(_hint(client, job_id))
    try:
        await asyncio.wait({first, hint}, return_when=asyncio.FIRST_COMPLETED)
        result = None if first.done() else await hint
        if result is not None and not first.done():
            yield Verdict(
                result.status, ("its stream is gone from Redis; the result is on the results topic",)
            )
            return
        yield await first
        async for item in items:
            yield item
    finally:
        for task in (first, hint):
            task.cancel()
        await asyncio.gather(first, hint, return_exceptions=True)


async def _hint(client: Client, job_id: str) -> Result | None:
    """Look up the result of a job that Redis does not know: it has not begun, or Redis has forgotten it."""
    await asyncio.sleep(HINT_AFTER_S)
    note(f"no worker has taken job {job_id} yet; is one running? (`tailrace serve`)")
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            return await client.lookup.find(job_id)
    except (KafkaError, OSError, TimeoutError):
        return None


class _Text:
    """Prints text on standard output, everything else on standard error."""

    def __init__(self) -> None:
        self._index = 0
        self._end: End | None = None

    def show(self, item: Start | Delta | End | Gap | Verdict) -> bool:
        if isinstance(item, Delta):
            if item.index != self._index:
                sys.stdout.write(f"\n[{item.index}] ")
                self._index = item.index
            sys.stdout.write(item.text)
            sys.stdout.flush()
        elif isinstance(item, Gap):
            note(f"\n{item}")
        elif isinstance(item, End):
            self._end = item
            self._close(item)
        elif isinstance(item, Verdict):
            for problem in item.problems:
                note(f"stream not whole: {problem}")
            return item.status == "completed" and item.complete
        return False

    def _close(self, end: End) -> None:
        print()
        if end.error is not None:
            note(f"{end.status}: {end.error.message}")
        elif end.status != "completed":
            note(end.status)
        elif sys.stderr.isatty():
            usage = end.usage
            note(f"({usage.prompt_tokens} + {usage.completion_tokens} tokens, ended by {end.finish_reason})")


class _Json:
    """Prints one line per event, as Redis has it, and lines of their own kind for gaps and the verdict."""

    def show(self, item: Start | Delta | End | Gap | Verdict) -> bool:
        if isinstance(item, Gap):
            print_json_line({"kind": "gap", "expected": item.expected, "found": item.found})
        elif isinstance(item, Verdict):
            print_json_line(
                {
                    "kind": "verdict",
                    "status": item.status,
                    "complete": item.complete,
                    "problems": item.problems,
                }
            )
            return item.status == "completed" and item.complete
        else:
            print_json_line(orjson.Fragment(encode_event(item)))
        return False


def _id_of(name: str) -> str:
    """Return the id of a job named by its id or by the custom_id of its batch line. Raises SettingsError."""
    job_id = job_id_of(name)
    if job_id is None:
        raise SettingsError(
            f"job id {name[:64]!r} must be 1–128 of A-Z a-z 0-9 . _ : -, "
            f"or a custom_id of 1–{MAX_CUSTOM_ID_CHARS} characters"
        )
    return job_id
