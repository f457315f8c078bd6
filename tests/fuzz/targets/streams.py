"""Readers of a job's stream: whatever is lost, doubled, late, damaged or foreign, they are never silently wrong."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

from service.errors import InternalError
from service.stream.assemble import Fed, StreamAssembler, standing
from service.stream.reader import FORGOTTEN_AFTER, Gap, Item, Verdict, _Reader
from service.stream.subscription import Sign
from service.wire import Delta, End, Event, Start
from tests.fuzz.target import Outcome, Target, expect
from tests.fuzz.targets.stories import JOB, Script, Story, foreign, script, story
from tests.support.configs import stream_config

SIGNS = (Sign.SILENCE, Sign.CONFIRMED)


@dataclass
class KeptLog:
    """As much of Redis as a reader asks for."""

    entries: list[bytes | None] = field(default_factory=list)
    """None for an entry that someone else made, without an event."""
    first: int = 0
    """How many were trimmed in front, so that the names of entries stay."""
    meta: list[bytes | None] = field(default_factory=lambda: [None, None])

    async def xrange(
        self, key: str, cursor: str, end: str, count: int
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        begin = 0 if cursor == "-" else int(cursor[1:].split("-")[0]) - self.first
        page = self.entries[begin : begin + count]
        entries = [{b"other": b"x"} if data is None else {b"event": data} for data in page]
        return [(b"%d-0" % (self.first + begin + i + 1), fields) for i, fields in enumerate(entries)]

    async def hmget(self, key: str, names: list[str]) -> list[bytes | None]:
        return self.meta

    def apply(self, step: str, value: bytes | int) -> None:
        if isinstance(value, bytes):
            self.entries.append(value)
        elif step == "stray":
            self.entries.append(None)
        elif step == "trimmed":
            self.first += min(value, len(self.entries))
            del self.entries[:value]
        elif step == "undone":
            del self.entries[len(self.entries) - value :]
        else:
            self.entries.clear()


def run_to_end(work: Coroutine[Any, Any, list[Item]]) -> list[Item]:
    """Run what never has to wait."""
    try:
        work.send(None)
    except StopIteration as stopped:
        value: list[Item] = stopped.value
        return value
    raise AssertionError("it waits")


class Client:
    """Believes what the reader tells it, and nothing else."""

    def __init__(self) -> None:
        self.position = (0, 0)
        self.pieces: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.events: list[Event] = []
        self.gaps = 0
        self._after_gap = False
        self.verdict: Verdict | None = None

    def take(self, item: Item) -> None:
        expect(self.verdict is None, "something follows the verdict", item)
        if isinstance(item, Verdict):
            self.verdict = item
        elif isinstance(item, Gap):
            self.gaps += 1
            self._after_gap = True
            if item.restarted:
                self.position, self.pieces = (0, 0), {}
        else:
            self._take_event(item)

    def _take_event(self, event: Event) -> None:
        place = (event.epoch, event.seq)
        expect(place >= self.position, "an event comes again, or too late", self.position, event)
        follows = place == self.position if not isinstance(event, Start) else event.epoch > self.position[0]
        expect(follows or self._after_gap, "events are missing and no gap says so", self.position, event)
        self._after_gap = False
        self.position = (event.epoch, event.seq + 1)
        self.events.append(event)
        if isinstance(event, Start):
            for index, count in enumerate(event.resumed_tokens):
                self._cut(index, count)
        elif isinstance(event, Delta):
            self.pieces.setdefault(event.index, []).append((event.text, event.token_ids))

    def _cut(self, index: int, num_tokens: int) -> None:
        """Back to so many tokens; text without tokens belongs to the tokens before it."""
        kept, known = [], 0
        for text, tokens in self.pieces.get(index, []):
            known += len(tokens)
            if known > num_tokens or not num_tokens:
                break
            kept.append((text, tokens))
        self.pieces[index] = kept

    def texts(self) -> list[str]:
        return [
            "".join(text for text, _ in self.pieces.get(i, []))
            for i in range(max(self.pieces, default=-1) + 1)
        ]


def same_texts(one: list[str] | tuple[str, ...], other: list[str] | tuple[str, ...]) -> bool:
    """Equal but for choices without text at the end."""
    length = max(len(one), len(other))
    padded = [[*texts, *[""] * (length - len(texts))] for texts in (one, other)]
    return padded[0] == padded[1]


@dataclass(frozen=True)
class Readers(Target):
    name = "stream"
    share = 0.3
    assembler: Callable[[str], StreamAssembler] = StreamAssembler

    def make(self, rng: Random) -> Script:
        return script(rng)

    def check(self, case: Script) -> Outcome:
        log, client = KeptLog(), Client()
        reader = _Reader(log, self.assembler(JOB), stream_config())  # type: ignore[arg-type]
        try:
            for step, value in case.steps:
                if step in ("heard", "sign"):
                    received = value if isinstance(value, bytes) else SIGNS[value]
                    self._take(reader, client, received)
                else:
                    log.apply(step, value)
                if client.verdict is not None:
                    break
            self._wait(reader, client, log, case)
        except (InternalError, ValueError) as error:
            expect(not case.sound, "refuses a sound stream", str(error))
            expect("event" in str(error), "does not say what is wrong", str(error))
            return Outcome.REFUSED
        self._judge(client, case)
        return Outcome.ACCEPTED

    def _take(self, reader: _Reader, client: Client, received: bytes | Sign) -> None:
        for item in run_to_end(reader.take(received)):
            client.take(item)

    def _wait(self, reader: _Reader, client: Client, log: KeptLog, case: Script) -> None:
        """The job ends without another word, or Redis forgets it: the reader has to find out by asking."""
        if case.ended:
            log.meta = [case.ended.encode(), b"1"]
        for _ in range(FORGOTTEN_AFTER + 2):
            if client.verdict is None:
                self._take(reader, client, Sign.SILENCE)

    def _judge(self, client: Client, case: Script) -> None:
        verdict, told = client.verdict, case.story
        if case.ended or client.events:
            expect(verdict is not None, "no verdict", client.events)
        if verdict is not None and verdict.complete:
            expect(same_texts(client.texts(), told.texts), "proves a wrong text", client.texts(), told.texts)
        if case.sound and case.ended:
            expect(client.events == list(told.events), "not every event", client.events, told.events)
            expect(
                not client.gaps and verdict is not None and verdict.complete,
                "not whole",
                verdict,
                client.gaps,
            )


@dataclass(frozen=True)
class Arrival:
    story: Story
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Assemblers(Target):
    """The assembler alone, with events in any order; after a gap it is told to go on, or not."""

    name = "assembler"
    share = 0.5
    assembler: Callable[[str], StreamAssembler] = StreamAssembler

    def make(self, rng: Random) -> Arrival:
        told = story(rng)
        events = [event for event in told.events if rng.random() < 0.95]
        for _ in range(rng.choice((0, 0, 1, 3))):
            if events:
                event = events.pop(rng.randrange(len(events)))
                odd = foreign(rng, event) if rng.random() < 0.3 else event
                events.insert(rng.randrange(len(events) + 1), odd)
        return Arrival(told, tuple(events))

    def check(self, case: Arrival) -> Outcome:
        assembler = self.assembler(JOB)
        num_gaps = 0
        try:
            for event in case.events:
                if assembler.feed(event) is Fed.GAP:
                    num_gaps += 1
                    assembler.skip_to(event)
        except ValueError as error:
            expect(any(event.id != JOB for event in case.events), "refuses its own events", str(error))
            return Outcome.REFUSED
        problems = assembler.problems()
        if not problems:
            expect(same_texts(assembler.texts(), case.story.texts), "proves a wrong text", assembler.texts())
        if case.events == case.story.events and isinstance(case.events[-1], End):
            expect(not problems and not num_gaps, "finds fault with a whole stream", problems)
            found = [tuple(assembler.choice(i).token_ids) for i in range(len(case.story.token_ids))]
            expect(found == list(case.story.token_ids), "other tokens", found)
            expect(
                assembler.texts() == list(case.story.texts)[: assembler.num_choices],
                "other texts",
                assembler.texts(),
            )
        self._check_standing(case)
        return Outcome.REFUSED if problems else Outcome.ACCEPTED

    def _check_standing(self, case: Arrival) -> None:
        """What an attempt resumes is a beginning of what some reader of the whole stream has seen."""
        resumed = standing(JOB, case.events, len(case.story.texts))
        for choice in resumed:
            expect(bool(choice.token_ids) or not choice.text, "text without tokens", choice)
