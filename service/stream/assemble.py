"""Assembles a job's text from its events, across attempts, and proves or disproves that it is whole."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from service.wire.common import TokenLogprob
from service.wire.event import Delta, End, Event, Start


class Fed(Enum):
    APPLIED = auto()
    DUPLICATE = auto()
    """Seen before, or from an attempt that a later one has replaced."""
    GAP = auto()
    """An earlier event is missing; the state is unchanged."""


@dataclass(slots=True)
class ChoiceState:
    """One choice so far. `parts` and `marks` are parallel: the text, and the tokens known after it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    lost_after: int | None = None
    """Number of parts before the first gap; None without a gap."""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def boundary(self, num_tokens: int) -> int | None:
        """Return how many parts make up the first `num_tokens` tokens; None when that is uncertain."""
        # Text without tokens belongs to the tokens before it; with none, the text begins anew.
        num_parts = bisect_right(self.marks, num_tokens) if num_tokens else 0
        known = self.marks[num_parts - 1] if num_parts else 0
        beyond_hole = self.lost_after is not None and num_parts > self.lost_after
        return num_parts if known == num_tokens and not beyond_hole else None

    def truncate(self, num_parts: int) -> None:
        num_tokens = self.marks[num_parts - 1] if num_parts else 0
        del (
            self.parts[num_parts:],
            self.marks[num_parts:],
            self.token_ids[num_tokens:],
            self.logprobs[num_tokens:],
        )
        self.lost_after = None

    def extend(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.parts.append(delta.text)
        self.marks.append(len(self.token_ids))

    def note_hole(self) -> None:
        if self.lost_after is None:
            self.lost_after = len(self.parts)


class StreamAssembler:
    """Takes the events of one job in any order of delivery; never skips a hole unless told to.

    A `start` of a higher epoch cuts every choice back to its `resumed_tokens`; that heals earlier holes when
    what remains lies before them.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.reset()

    def reset(self) -> None:
        """Forget everything, for a log that starts over."""
        self.epoch = 0
        self.next_seq = 0
        """Within `epoch`; together the position."""
        self.end: End | None = None
        self.holed = False
        """An event is missing that no later attempt has replaced."""
        self._choices: dict[int, ChoiceState] = {}

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.next_seq

    @property
    def num_choices(self) -> int:
        return max(self._choices, default=-1) + 1

    def choice(self, index: int) -> ChoiceState:
        return self._choices.setdefault(index, ChoiceState())

    def texts(self) -> list[str]:
        return [self.choice(index).text for index in range(self.num_choices)]

    def feed(self, event: Event) -> Fed:
        """Raises ValueError for an event of another job."""
        if event.id != self.job_id:
            raise ValueError(f"event of job {event.id!r} in the stream of job {self.job_id!r}")
        if self.end is not None or (event.epoch, event.seq) < self.position:
            return Fed.DUPLICATE
        if isinstance(event, Start):
            if event.epoch <= self.epoch or event.seq != 0 or not self._can_resume(event):
                return Fed.GAP
            self.holed = False
        elif (event.epoch, event.seq) != self.position or event.seq == 0:
            return Fed.GAP
        self._apply(event)
        return Fed.APPLIED

    def skip_to(self, event: Event) -> None:
        """Take an event that `feed` called a gap: the text is incomplete from here on."""
        if isinstance(event, Start):
            unknown = [
                i for i, count in enumerate(event.resumed_tokens) if self.choice(i).boundary(count) is None
            ]
            holed = [self.choice(index) for index in unknown]
        else:
            if isinstance(event, Delta):
                self.choice(event.index)
            holed = list(self._choices.values())
        for state in holed:
            state.note_hole()
        self._apply(event)
        self.holed = True

    def problems(self) -> list[str]:
        """Why the text is not proven to be whole; empty when count and hash agree with the end event."""
        if self.end is None:
            return ["no end event"]
        found = []
        if self.end.events != self.next_seq:
            found.append(f"the end event counts {self.end.events} events, its seq makes {self.next_seq}")
        if self.holed:
            found.append("events are missing")
        hashes = [hashlib.sha256(text.encode()).hexdigest() for text in self.texts()]
        expected = list(self.end.text_sha256)
        hashes += [hashlib.sha256().hexdigest()] * (len(expected) - len(hashes))
        if hashes != expected:
            found.append(f"text_sha256 is {expected}, the text received has {hashes}")
        return found

    def _can_resume(self, start: Start) -> bool:
        return all(
            self._choices.get(index, _EMPTY).boundary(num_tokens) is not None
            for index, num_tokens in enumerate(start.resumed_tokens)
        )

    def _apply(self, event: Event) -> None:
        self.epoch, self.next_seq = event.epoch, event.seq + 1
        if isinstance(event, Delta):
            self.choice(event.index).extend(event)
        elif isinstance(event, End):
            self.end = event
        else:
            for index, num_tokens in enumerate(event.resumed_tokens):
                num_parts = self.choice(index).boundary(num_tokens)
                if num_parts is not None:
                    self.choice(index).truncate(num_parts)


_EMPTY = ChoiceState()


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


def standing(job_id: str, events: Iterable[Event], num_choices: int) -> tuple[ResumedChoice, ...]:
    """Trusts a log up to its first gap; after a gap only an attempt that starts before it counts.

    The next attempt announces exactly these tokens in its `start`: every reader cuts back to the same place.
    """
    assembler = StreamAssembler(job_id)
    for event in events:
        assembler.feed(event)
    choices = []
    for index in range(num_choices):
        state = assembler.choice(index)
        if not state.token_ids:
            state.truncate(0)
        choices.append(ResumedChoice(tuple(state.token_ids), state.text, tuple(state.logprobs)))
    return tuple(choices)
