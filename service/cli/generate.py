"""`tailrace generate`, `tail` and `cancel`: one job's stream on the screen."""

import asyncio
import secrets
import sys
from contextlib import aclosing
from typing import Any

import orjson
import typer

from service.cli.console import note, print_json_line, run
from service.client import Client, client_settings
from service.errors import JobError, SettingsError
from service.stream.assemble import StreamAssembler
from service.stream.reader import Gap, Verdict
from service.wire import Delta, End, Start, encode_event, parse_job
from service.wire.limits import ID_PATTERN

HINT_AFTER_S = 5.0


def make_job(
    prompt: str, *, system: str | None, raw: bool, job_id: str | None, seed: int | None, model: str | None,
    stop: list[str], **parameters: Any,
) -> dict[str, Any]:  # fmt: skip
    """The job of the command's options; raises SettingsError for what no worker would accept."""
    if prompt == "-":
        prompt = sys.stdin.read()
    job: dict[str, Any] = {"id": job_id or f"gen-{secrets.token_hex(8)}", **parameters}
    if raw:
        if system is not None:
            raise SettingsError("--system needs a chat template; leave out --raw")
        job["prompt"] = prompt
    else:
        turns = [{"role": "system", "content": system}] if system is not None else []
        job["messages"] = [*turns, {"role": "user", "content": prompt}]
    job |= {name: value for name, value in (("seed", seed), ("model", model), ("stop", stop)) if value}
    try:
        parse_job(orjson.dumps(job), key=None, timestamp_ms=0)
    except JobError as error:
        raise SettingsError(error.message) from error
    return job


def generate(job: dict[str, Any], *, as_json: bool) -> None:
    if not run(_generate(job, as_json=as_json)):
        raise typer.Exit(1)


async def _generate(job: dict[str, Any], *, as_json: bool) -> bool:
    job_id = job["id"]
    async with Client(client_settings()) as client:
        try:
            await client.publish(job_id, orjson.dumps(job))
            return await follow(client, job_id, as_json=as_json)
        except asyncio.CancelledError:
            await client.cancel(job_id)
            note(f"\ncancelled {job_id}")
            raise


def tail(job_id: str, *, as_json: bool) -> None:
    if not run(_tail(_checked(job_id), as_json=as_json)):
        raise typer.Exit(1)


async def _tail(job_id: str, *, as_json: bool) -> bool:
    async with Client(client_settings(), kafka=False) as client:
        return await follow(client, job_id, as_json=as_json)


def cancel(job_id: str, *, wait: bool) -> None:
    if not run(_cancel(_checked(job_id), wait=wait)):
        raise typer.Exit(1)


async def _cancel(job_id: str, *, wait: bool) -> bool:
    async with Client(client_settings(), kafka=False) as client:
        await client.cancel(job_id)
        print(f"cancellation of {job_id} requested")
        if not wait:
            return True
        async with aclosing(client.stream(job_id)) as items:
            async for item in items:
                if isinstance(item, Verdict):
                    print(f"{job_id} ended: {item.status}")
        return True


async def follow(client: Client, job_id: str, *, as_json: bool) -> bool:
    """Print the stream until it ends. True: completed, and proven whole."""
    printer = _Json() if as_json else _Text()
    hint = asyncio.get_running_loop().call_later(HINT_AFTER_S, _hint, job_id)
    good = False
    try:
        async with aclosing(client.stream(job_id, StreamAssembler(job_id))) as items:
            async for item in items:
                hint.cancel()
                good = printer.show(item)
    finally:
        hint.cancel()
    return good


def _hint(job_id: str) -> None:
    note(f"no worker has taken job {job_id} yet; is one running? (`tailrace serve`)")


class _Text:
    """Text on standard output, everything else on standard error."""

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
    """One line per event, as it stands in Redis; gaps and the verdict as lines of their own kind."""

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


def _checked(job_id: str) -> str:
    import re

    if not re.fullmatch(ID_PATTERN, job_id):
        raise SettingsError(f"job id {job_id[:64]!r} must be 1–128 of A-Z a-z 0-9 . _ : -")
    return job_id
