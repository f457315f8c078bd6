"""What the service itself writes: results, dead letters and events. A reader meets foreign and damaged ones too."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from service.errors import InternalError
from service.wire import (
    DeadLetter,
    Delta,
    End,
    Event,
    Origin,
    Result,
    Start,
    batch_output,
    encode_event,
    limits,
    parse_dead_letter,
    parse_event,
    parse_result,
    text_sha256,
)
from tests.fuzz.mutate import bad_json, respelled_json
from tests.fuzz.target import Outcome, Target, expect

TEXTS = ("", "a", "世界", "👋🏽\u200d", '"\\', "\x00", "x" * 100)
ERROR = {"code": "invalid_value", "message": "n: 17", "field": "n", "value": 17, "limit": "16"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}


def logprobs(rng: Random, count: int) -> list[dict[str, Any]]:
    token: dict[str, Any] = {
        "token": rng.choice(("a", "bytes:\\xe2\\x80", "")),
        "token_id": 3,
        "logprob": -0.25,
    }
    top = [token, {**token, "token_id": 4}]
    return [{**token, "top": top[: rng.randrange(3)]} for _ in range(count)]


def good_result(rng: Random) -> dict[str, Any]:
    choices = []
    for index in range(rng.randrange(3)):
        choice: dict[str, Any] = {
            "index": index,
            "text": rng.choice(TEXTS),
            "finish_reason": rng.choice(("stop", None)),
        }
        if rng.random() < 0.5:
            choice["token_ids"] = [1, 2]
        if rng.random() < 0.5:
            choice["logprobs"] = logprobs(rng, 2)
        choices.append(choice)
    result: dict[str, Any] = {
        "v": 1,
        "id": rng.choice(("j", "A.b:c_d-0" * 14)),
        "status": rng.choice(("completed", "failed", "rejected", "expired", "cancelled")),
        "attempt": rng.choice((1, 2, 2**31)),
        "worker": "w",
        "choices": choices,
        "usage": USAGE,
        "timings": {"queued_s": 0.1, "ttft_s": 0, "tpot_s": None, "e2e_s": 1.5},
        "slo": {"ttft_met": True, "tpot_met": None},
        "metadata": rng.choice((None, {}, {"k": [1, {"x": None}]})),
    }
    if rng.random() < 0.3:
        result["error"] = ERROR
    if rng.random() < 0.3:
        result["custom_id"] = "any thing/é"
    return result


def good_event(rng: Random) -> dict[str, Any]:
    event: dict[str, Any] = {"v": 1, "id": "j", "epoch": rng.choice((0, 1, 1_700_000_000_000_000))}
    kind = rng.choice(("start", "delta", "end"))
    if kind == "start":
        resumed = [rng.randrange(100) for _ in range(rng.randrange(3))]
        return event | {"kind": kind, "seq": 0, "resumed_tokens": resumed, "attempt": 2, "worker": "w"}
    seq = rng.randrange(1000)
    if kind == "delta":
        token_ids = [rng.choice((0, 1, limits.MAX_TOKEN_ID)) for _ in range(rng.randrange(4))]
        delta = {"kind": kind, "seq": seq, "index": rng.randrange(16), "text": rng.choice(TEXTS)}
        more = {"logprobs": logprobs(rng, len(token_ids))} if rng.random() < 0.3 else {}
        return event | delta | {"token_ids": token_ids} | more
    end = {
        "status": "completed",
        "finish_reason": rng.choice(("stop", None)),
        "usage": USAGE,
        "events": seq + 1,
    }
    hashes = [text_sha256([text]) for text in rng.sample(TEXTS, rng.randrange(3))]
    cause = {"error": ERROR} if rng.random() < 0.3 else {}
    return event | {"kind": kind, "seq": seq, "text_sha256": hashes} | end | cause


@dataclass(frozen=True)
class Written:
    data: bytes
    good: bool


def written(rng: Random, document: dict[str, Any]) -> Written:
    good = rng.random() < 0.15
    return Written(respelled_json(rng, document) if good else bad_json(rng, document), good)


def check_refusal(error: InternalError, what: str, good: bool) -> Outcome:
    expect(not good, f"refused a good {what}", str(error))
    expect(what in str(error), "does not say what is wrong", str(error))
    str(error).encode()
    return Outcome.REFUSED


@dataclass(frozen=True)
class Results(Target):
    name = "result"
    parse: Callable[[bytes], Result] = parse_result

    def make(self, rng: Random) -> Written:
        return written(rng, good_result(rng))

    def check(self, case: Written) -> Outcome:
        try:
            result = self.parse(case.data)
        except InternalError as error:
            return check_refusal(error, "result", case.good)
        expect(self.parse(result.encode()) == result, "does not survive being written", result)
        for url in ("/v1/chat/completions", "/v1/completions"):
            orjson.dumps(batch_output(result, url=url, model="m", created_s=0))
        return Outcome.ACCEPTED


@dataclass(frozen=True)
class Events(Target):
    name = "event"
    parse: Callable[[bytes], Event] = parse_event

    def make(self, rng: Random) -> Written:
        return written(rng, good_event(rng))

    def check(self, case: Written) -> Outcome:
        try:
            event = self.parse(case.data)
        except InternalError as error:
            return check_refusal(error, "event", case.good)
        expect(isinstance(event, (Start, Delta, End)), "no event", event)
        expect(self.parse(encode_event(event)) == event, "does not survive being written", event)
        return Outcome.ACCEPTED


Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True)
class Letter:
    key: bytes | None
    value: bytes | None
    headers: Headers
    good: DeadLetter | None


@dataclass(frozen=True)
class DeadLetters(Target):
    name = "dead_letter"
    share = 0.5
    parse: Callable[..., DeadLetter] = parse_dead_letter

    def make(self, rng: Random) -> Letter:
        names = ("traceparent", "tailrace-dl-topic", "tailrace-dl-message", "", "é", "x" * 300)
        values = (b"", b"1", b"\xff\xfe", b"v" * 2000, "世".encode() * 400)
        own = tuple((rng.choice(names), rng.choice(values)) for _ in range(rng.randrange(4)))
        message = rng.choice(("id: missing", "世" * 900, "x" * 3000, "\x00"))
        origin = Origin(
            "tailrace.jobs", rng.randrange(99), rng.choice((0, 2**63 - 1)), -1, 2, "code", message
        )
        letter = DeadLetter(rng.choice((None, b"k")), rng.choice((None, b"", b"{}")), own, origin)
        headers: list[tuple[str, bytes | None]] = list(letter.record_headers())
        if rng.random() < 0.2:
            return Letter(letter.key, letter.value, tuple(headers), letter)
        odd: tuple[bytes | None, ...] = (
            *(
                None,
                b"",
                b"-1",
                b" 1 ",
                b"1_0",
                "１２".encode(),
                b"9" * 2000,
                b"9" * 5000,
                b"1.5",
                b"NaN",
                b"\xff",
            ),
            *(b"9223372036854775808", b"x" * 2000),
        )
        for _ in range(rng.randrange(1, 3)):
            at = (
                rng.randrange(len(headers))
                if rng.random() < 0.2
                else max(0, len(headers) - rng.randrange(1, 8))
            )
            kind = rng.random()
            if kind < 0.7:
                headers[at] = (headers[at][0], rng.choice(odd))
            elif kind < 0.8:
                headers[at] = (rng.choice(names), headers[at][1])
            elif kind < 0.9:
                del headers[at]
            else:
                headers.insert(at, (rng.choice(names), rng.choice(odd)))
            if not headers:
                break
        return Letter(letter.key, letter.value, tuple(headers), None)

    def check(self, case: Letter) -> Outcome:
        try:
            letter = self.parse(case.key, case.value, list(case.headers))
        except InternalError as error:
            expect(case.good is None, "refused a good dead letter", str(error))
            str(error).encode()
            return Outcome.REFUSED
        own = list(case.headers[: len(letter.headers)])
        expect(letter.replay() == (case.key, case.value, own), "not the original", letter)
        expect(
            len(case.headers) - len(own) == len(letter.origin.headers()),
            "took another number of headers",
            letter,
        )
        again = self.parse(case.key, case.value, letter.record_headers())
        expect(
            self.parse(case.key, case.value, again.record_headers()) == again, "does not stay as it is", again
        )
        for name in ("partition", "offset", "timestamp_ms", "attempt"):
            expect(getattr(again.origin, name) == getattr(letter.origin, name), f"another {name}", letter)
        for name in ("topic", "code", "message"):
            expect(
                getattr(letter.origin, name).startswith(getattr(again.origin, name)),
                f"another {name}",
                letter,
            )
        if case.good is not None:
            expect(letter.origin.offset == case.good.origin.offset, "offset", letter)
            expect(case.good.origin.message.startswith(letter.origin.message), "message", letter)
        return Outcome.ACCEPTED
