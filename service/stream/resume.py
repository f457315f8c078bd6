"""What earlier attempts wrote to a log and still stands."""

from collections.abc import Iterable
from dataclasses import dataclass

from service.stream.assemble import StreamAssembler
from service.wire.common import TokenLogprob
from service.wire.event import Event


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


def standing(job_id: str, events: Iterable[Event], num_choices: int) -> tuple[ResumedChoice, ...]:
    """Trusts a log up to its first hole; behind a hole only an attempt that starts before it counts.

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
