"""Makes the events of one job, and what may happen to them on the way to a reader."""

from dataclasses import dataclass, replace
from random import Random

from service.wire import Delta, End, Event, Start, Usage, encode_event, text_sha256
from tests.fuzz.mutate import mutated_bytes

JOB = "job-1"
TEXTS = ("", "a", "ab ", "é", "世界", "👋", "\x00", "x" * 50)


@dataclass(frozen=True)
class Story:
    """What the service wrote: up to three attempts, each resuming at an edge of what stood."""

    events: tuple[Event, ...]
    texts: tuple[str, ...]
    """Of each choice, over all attempts."""
    token_ids: tuple[tuple[int, ...], ...]


def story(rng: Random) -> Story:
    num_choices = rng.choice((1, 1, 1, 2, 3))
    kept: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(num_choices)]
    events: list[Event] = []
    seq = epoch = 0
    for _ in range(rng.choice((1, 1, 2, 3))):
        epoch += rng.choice((1, 1, 3))
        for pieces in kept:
            del pieces[rng.randrange(len(pieces) + 1) if rng.random() < 0.5 else len(pieces) :]
        events.append(Start(JOB, epoch, tuple(sum(len(tokens) for _, tokens in pieces) for pieces in kept)))
        for seq in range(1, rng.randrange(1, 9)):
            index = rng.randrange(num_choices)
            tokens = tuple(rng.randrange(9) for _ in range(rng.randrange(1, 4)))
            kept[index].append((rng.choice(TEXTS), tokens))
            events.append(Delta(JOB, epoch, seq, index, *kept[index][-1]))
        seq = events[-1].seq + 1
    texts = tuple("".join(text for text, _ in pieces) for pieces in kept)
    if rng.random() < 0.95:
        hashes = tuple(text_sha256([text]) for text in texts)
        events.append(End(JOB, epoch, seq, "completed", "stop", Usage(), seq + 1, hashes))
    ids = tuple(tuple(token for _, tokens in pieces for token in tokens) for pieces in kept)
    return Story(tuple(events), texts, ids)


def foreign(rng: Random, event: Event) -> Event:
    """An event that is not of this stream: of another job, of another attempt, or of another place in it."""
    kind = rng.random()
    if kind < 0.3:
        return replace(event, id="job-2")
    if kind < 0.6:
        return replace(event, epoch=max(0, event.epoch + rng.choice((-2, -1, 1, 2, 2**40))))
    if isinstance(event, Start):
        return replace(
            event, resumed_tokens=tuple(rng.choice((0, 1, 5, 2**31)) for _ in range(rng.randrange(4)))
        )
    if isinstance(event, Delta) and kind < 0.8:
        return replace(event, index=rng.randrange(16), text=rng.choice(TEXTS))
    return replace(event, seq=max(1, event.seq + rng.choice((-3, -1, 1, 2, 2**40))))


def damaged(rng: Random, event: Event) -> bytes:
    return mutated_bytes(rng, encode_event(event))


Step = tuple[str, bytes | int]
"""What happens next: an event is `logged`, one is `heard` on the channel, a `sign` comes, or something is done to the
log that no worker does."""


@dataclass(frozen=True)
class Script:
    story: Story
    steps: tuple[Step, ...]
    sound: bool
    """The log lost and changed nothing, and every message is one of the log's: the reader has to see all."""
    ended: str | None
    """What the job's own hash says of its end, for a reader that asks."""


def script(rng: Random) -> Script:
    told = story(rng)
    sound = rng.random() < 0.35
    steps: list[Step] = [("sign", 1)] if rng.random() < 0.9 else []
    late: list[bytes] = []
    for event in told.events:
        data = encode_event(event)
        steps += [("logged", data)] if sound else _written(rng, event, data)
        steps += _delivered(rng, event, data, late, sound=sound)
    steps += [("heard", data) for data in late]
    ends = isinstance(told.events[-1], End)
    steps += [("sign", 1)] if sound else [("sign", rng.randrange(2)) for _ in range(rng.randrange(4))]
    return Script(told, tuple(steps), sound, "completed" if ends else None)


def _written(rng: Random, event: Event, data: bytes) -> list[Step]:
    kind = rng.random()
    if kind < 0.88:
        steps: list[Step] = [("logged", data)]
    elif kind < 0.94:
        steps = []
    elif kind < 0.97:
        steps = [("logged", damaged(rng, event))]
    else:
        steps = [("logged", data), ("logged", encode_event(foreign(rng, event)))]
    if rng.random() < 0.04:
        kinds = (("trimmed", rng.randrange(6)), ("undone", rng.randrange(4)), ("forgotten", 0), ("stray", 0))
        steps.append(rng.choice(kinds))
    return steps


def _delivered(rng: Random, event: Event, data: bytes, late: list[bytes], *, sound: bool) -> list[Step]:
    """Lost, doubled and late messages are everyday; damaged and foreign ones only where the log is not sound either."""
    kind = rng.random()
    steps: list[Step] = []
    if kind < 0.7:
        steps = [("heard", data)] * rng.choice((1, 1, 1, 2))
    elif kind < 0.85:
        late.append(data)
    if late and rng.random() < 0.3:
        steps.append(("heard", late.pop(rng.randrange(len(late)))))
    if rng.random() < 0.1:
        steps.append(("sign", rng.randrange(2)))
    if not sound and rng.random() < 0.04:
        odd = damaged(rng, event) if rng.random() < 0.5 else encode_event(foreign(rng, event))
        steps.append(("heard", odd))
    return steps
