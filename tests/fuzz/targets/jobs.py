"""Records of the jobs topic: jobs, lines of OpenAI Batch files, and whole files of them."""

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from service.errors import JobError
from service.pipelines.job_file import read_lines
from service.wire import (
    ErrorInfo,
    Job,
    Result,
    claimed_custom_id,
    job_id_of,
    limits,
    parse_job,
    parse_result,
    readable_id,
)
from tests.fuzz.mutate import bad_json, mutated_bytes, respelled_json
from tests.fuzz.target import Outcome, Target, expect

NOW_MS = 1_700_000_000_000
TEXTS = (
    "x",
    "Say hello.",
    "naïve 世界 👋",
    '"quoted": \\ {"id": 1}',
    "a\x00b",
    "\ufeff",
    "line\nline\r\n\t",
    "k" * 300,
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]}
FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    {"type": "json_schema", "json_schema": {"name": "n", "description": None, "schema": {}}},
    {"type": "regex", "regex": "[a-z]+"},
    {"type": "choice", "choice": ["yes", "no"]},
)
METADATA: tuple[Any, ...] = (
    {},
    {"k": [1, {"x": None}], "é": 1.5},
    {"id": "prompt", "a": {"a": {"a": []}}},
    None,
)
Maker = Callable[[Random], Any]
COMMON: dict[str, Maker] = {
    "model": lambda rng: rng.choice(("m", "org/model", None)),
    "max_tokens": lambda rng: rng.choice((64, 100, limits.MAX_NEW_TOKENS)),
    "min_tokens": lambda rng: rng.choice((0, 1, 64)),
    "temperature": lambda rng: rng.choice((0, 0.0, 1, 0.7, 2)),
    "top_p": lambda rng: rng.choice((1, 0.1, 1e-9)),
    "top_k": lambda rng: rng.choice((-1, 0, 1, limits.MAX_TOP_K)),
    "min_p": lambda rng: rng.choice((0, 1, 0.05)),
    "seed": lambda rng: rng.choice((0, -1, limits.MIN_SEED, limits.MAX_SEED)),
    "stop": lambda rng: rng.choice(("a", ["a", "bc"], [], ["é" * limits.MAX_STOP_CHARS])),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "presence_penalty": lambda rng: rng.choice((-2, 0.5, 2)),
    "frequency_penalty": lambda rng: rng.choice((-2, 0.5, 2)),
    "repetition_penalty": lambda rng: rng.choice((limits.MIN_REPETITION_PENALTY, 1, 2)),
    "logit_bias": lambda rng: rng.choice(({}, {"0": -100}, {"7": 1.5, str(limits.MAX_TOKEN_ID): 100})),
    "n": lambda rng: rng.choice((1, 2, limits.MAX_CHOICES)),
    "response_format": lambda rng: rng.choice(FORMATS),
    "stream": lambda rng: rng.random() < 0.5,
    "return_token_ids": lambda rng: rng.random() < 0.5,
    "metadata": lambda rng: rng.choice(METADATA),
}
OF_JOBS: dict[str, Maker] = COMMON | {
    "logprobs": lambda rng: rng.choice((0, 1, limits.MAX_TOP_LOGPROBS)),
    "service_class": lambda rng: rng.choice(("interactive", "standard", "batch")),
    "slo": lambda rng: rng.choice(({}, {"ttft_ms": 1, "tpot_ms": 0.5}, {"ttft_ms": None})),
    "deadline": lambda rng: rng.choice(
        (1, 0.001, "2030-01-31T12:00:00Z", "2030-01-31t12:00:00.123456789+01:00")
    ),
    "tenant": lambda rng: rng.choice(("t", "é" * limits.MAX_TENANT_CHARS)),
    "custom_id": lambda rng: rng.choice(("c", "any thing/é")),
}
EMPTY_FIELDS = {"tools": [], "store": False, "user": "", "audio": None, "service_tier": None, "functions": {}}


def content(rng: Random) -> Any:
    text = rng.choice(TEXTS)
    return text if rng.random() < 0.6 else [{"type": "text", "text": text}] * rng.randrange(3)


def message(rng: Random) -> dict[str, Any]:
    role = rng.choice(("system", "developer", "user", "assistant", "tool"))
    turn: dict[str, Any] = {"role": role, "content": content(rng)}
    if role == "assistant" and rng.random() < 0.3:
        turn |= {"content": None, "refusal": "no", "tool_calls": []}
    if rng.random() < 0.2:
        turn |= {"name": "n", "tool_call_id": "t"}
    return turn


def prompt_fields(rng: Random) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"prompt": rng.choice(TEXTS)}
    if kind == 1:
        return {
            "prompt_token_ids": [rng.choice((0, 1, limits.MAX_TOKEN_ID)) for _ in range(rng.randrange(1, 9))]
        }
    return {"messages": [message(rng) for _ in range(rng.randrange(1, 4))]}


def some(rng: Random, makers: dict[str, Maker], at_most: int) -> dict[str, Any]:
    names = rng.sample(sorted(makers), rng.randrange(at_most))
    return {name: makers[name](rng) for name in names}


def good_job(rng: Random) -> dict[str, Any]:
    job = {"id": rng.choice(("job-1", "a", "A.b:c_d-0" * 14)), **prompt_fields(rng), **some(rng, OF_JOBS, 7)}
    if rng.random() < 0.1:
        job |= EMPTY_FIELDS
    return job


def good_line(rng: Random) -> dict[str, Any]:
    chat = rng.random() < 0.6
    body = some(rng, COMMON, 6)
    if chat:
        body["messages"] = [message(rng) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.3:
            body |= rng.choice(
                ({"logprobs": True, "top_logprobs": 3}, {"logprobs": False}, {"logprobs": True})
            )
    else:
        body["prompt"] = rng.choice(("x", ["x"], [1, 2], [[1, 2]]))
        if rng.random() < 0.3:
            body["logprobs"] = 2
    if rng.random() < 0.2:
        body["stop_token_ids"] = [1, 2]
    custom_id = rng.choice(("request-1", "a", "mit Leerzeichen/é", "x" * limits.MAX_CUSTOM_ID_CHARS))
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@dataclass(frozen=True)
class Record:
    value: bytes | None
    key: bytes | None
    timestamp_ms: int
    max_bytes: int = limits.MAX_RECORD_BYTES
    good: dict[str, Any] | None = None
    """What the value was written from, if nothing was changed since: it has to be accepted."""


def record(rng: Random, document: dict[str, Any]) -> Record:
    key = rng.choice((b"key-1", b"key-1", None, b"", b"\xff key", b"a/b", b"k" * 200))
    if rng.random() < 0.15:
        return Record(respelled_json(rng, document), key, NOW_MS, good=document)
    stamp = rng.choice((NOW_MS, NOW_MS, -1, 0, 1_700_000_000, 1 << 62))
    limit = limits.MAX_RECORD_BYTES if rng.random() < 0.98 else 200
    value = None if rng.random() < 0.002 else bad_json(rng, document)
    return Record(value, key, stamp, limit)


def has_repeated_names(value: bytes) -> bool:
    """Tell, with a reader of its own, whether an object names a field twice."""
    repeated = False

    def collect(pairs: list[tuple[str, Any]]) -> None:
        nonlocal repeated
        repeated |= len({name for name, _ in pairs}) < len(pairs)

    json.loads(value.removeprefix(b"\xef\xbb\xbf"), object_pairs_hook=collect, parse_int=float)
    return repeated


def check_refusal(error: JobError) -> None:
    """A refusal names field, value and limit, and can be written into a result."""
    expect(
        bool(error.field) and error.value is not None and error.limit is not None,
        "names not all",
        vars(error),
    )
    expect(
        error.message.startswith(f"{error.field}: "),
        "does not begin with its field",
        error.message,
        error.field,
    )
    expect(len(error.message.encode()) <= limits.MAX_ERROR_MESSAGE_BYTES, "message too long", error.message)
    if error.job_id is not None:
        expect(readable_id(error.job_id.encode()) == error.job_id, "id outside its alphabet", error.job_id)
    result = Result(error.job_id or "id", "rejected", 1, "w", error=ErrorInfo.of(error))
    expect(parse_result(result.encode()) == result, "refusal does not survive its result", result)


def check_job(job: Job, record: Record) -> None:
    assert record.value is not None
    expect(not has_repeated_names(record.value), "took one of two values", record.value)
    numbers = [value for value in vars(job).values() if isinstance(value, float)]
    expect(all(map(math.isfinite, numbers)), "not finite", numbers)
    written = orjson.dumps(job.model_dump(mode="json", by_alias=True, exclude_none=True))
    again = parse_job(written, key=None, timestamp_ms=record.timestamp_ms)
    expect(again == job, "does not survive being written", job, again)
    expect(1 <= job.n <= limits.MAX_CHOICES and len(job.stop) <= limits.MAX_STOPS, "above a limit", job)
    job.template_messages()
    job.deadline_at_ms(record.timestamp_ms)
    expect(0 <= job.seed_of_choice(0) < 1 << 64, "seed", job.seed)


Parse = Callable[..., Job]


@dataclass(frozen=True)
class Jobs(Target):
    name = "job"
    share = 2.0
    parse: Parse = parse_job

    def make(self, rng: Random) -> Record:
        return record(rng, good_job(rng))

    def check(self, case: Record) -> Outcome:
        claimed = claimed_custom_id(case.value)
        expect(claimed is None or bool(orjson.dumps(claimed)), "custom_id", claimed)
        try:
            job = self.parse(
                case.value, key=case.key, timestamp_ms=case.timestamp_ms, max_record_bytes=case.max_bytes
            )
        except JobError as error:
            check_refusal(error)
            expect(case.good is None, "refused a good record", str(error))
            return Outcome.REFUSED
        check_job(job, case)
        self.check_good(job, case)
        return Outcome.ACCEPTED

    def check_good(self, job: Job, case: Record) -> None:
        """What was given is what was read."""
        if case.good is None:
            return
        for name in ("id", "prompt", "seed", "max_tokens", "deadline", "tenant"):
            expect(case.good.get(name) == getattr(job, name), f"{name} read as something else", job)
        expect(case.good.get("temperature", 1.0) == job.temperature, "temperature", job)
        expect([*case.good.get("prompt_token_ids", ())] == [*(job.prompt_token_ids or ())], "ids", job)
        expect(len(case.good.get("messages", ())) == len(job.messages or ()), "messages", job)


@dataclass(frozen=True)
class BatchLines(Jobs):
    name = "batch_line"
    share = 2.0

    def make(self, rng: Random) -> Record:
        return record(rng, good_line(rng))

    def check_good(self, job: Job, case: Record) -> None:
        if case.good is not None:
            expect(job.id == job_id_of(case.good["custom_id"]), "id", job)
            expect(job.custom_id == case.good["custom_id"], "custom_id", job)
            expect(job.seed == case.good["body"].get("seed"), "seed", job)


@dataclass(frozen=True)
class BatchFiles(Target):
    """Every line of a file that is not blank gives a job or an error, and the number of its line."""

    name = "batch_file"
    share = 0.2
    read: Callable[..., Any] = read_lines

    def make(self, rng: Random) -> bytes:
        lines = [
            bad_json(rng, document) if rng.random() < 0.5 else orjson.dumps(document)
            for document in (rng.choice((good_job, good_line))(rng) for _ in range(rng.randrange(5)))
        ]
        data = rng.choice((b"\n", b"\r\n", b"\n\n")).join(lines) + rng.choice((b"", b"\n"))
        return mutated_bytes(rng, data) if rng.random() < 0.3 else data

    def check(self, case: bytes) -> Outcome:
        lines = list(self.read(io.BytesIO(case), model="m", max_bytes=2000))
        wanted = [number for number, line in enumerate(case.split(b"\n"), start=1) if line.strip()]
        if case.startswith(b"\xef\xbb\xbf") and not case.split(b"\n")[0][3:].strip():
            wanted = [number for number in wanted if number > 1]
        expect(
            [line.number for line in lines] == wanted,
            "numbers of lines",
            wanted,
            [line.number for line in lines],
        )
        ids = [line.job.id for line in lines if line.job is not None]
        expect(len(set(ids)) == len(ids), "two jobs of one id", ids)
        for line in lines:
            expect((line.job is None) != (line.error is None), "neither or both", line)
            if line.error is not None:
                check_refusal(line.error)
        return Outcome.REFUSED if any(line.error for line in lines) else Outcome.ACCEPTED
