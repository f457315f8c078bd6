"""From a job's text to its prompt's ids, off the event loop."""

import asyncio
from concurrent.futures import Executor
from typing import Final, NamedTuple

from service.text.tokenizer import Tokenizer
from service.wire import Job

LONG_TEXT_CHARS: Final = 1 << 14
"""Takes about 10 ms, which is what a job behind it waits; a record's full 1 MiB takes a second."""


class TextLanes(NamedTuple):
    """One thread each, so that texts are taken in the order of arrival."""

    short: Executor
    long: Executor


class PromptEncoder:
    """Templates and tokenization. Long texts wait for each other; a short one waits for short ones alone."""

    def __init__(self, tokenizer: Tokenizer, lanes: TextLanes, *, max_tokens: int) -> None:
        """`max_tokens` is the model's length: no longer prompt can be run."""
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._max_tokens = max_tokens

    async def encode(self, job: Job, date_ms: int) -> tuple[int, ...]:
        """Raises JobError for a prompt that the model's template refuses, or that cannot fit into its length."""
        is_long = _num_chars(job) > LONG_TEXT_CHARS
        lane = self._lanes.long if is_long else self._lanes.short
        # Of a short text that does not fit, the scheduler can tell how many tokens it has.
        max_tokens = self._max_tokens if is_long else None
        return await asyncio.get_running_loop().run_in_executor(
            lane, encode_prompt, job, self._tokenizer, date_ms, max_tokens
        )


def _num_chars(job: Job) -> int:
    return len(job.prompt or "") + sum(len(message.content) for message in job.messages or ())


def encode_prompt(job: Job, tokenizer: Tokenizer, date_ms: int, max_tokens: int | None) -> tuple[int, ...]:
    """The prompt's ids; runs off the event loop.

    A template that writes the date writes that of `date_ms`. Raises JobError; given `max_tokens`, at once for a text
    that cannot fit in so many.
    """
    if job.prompt_token_ids is not None:
        return tuple(job.prompt_token_ids)
    if job.prompt is not None:
        return tuple(tokenizer.encode_prompt(job.prompt, max_tokens=max_tokens))
    messages = job.template_messages()
    return tuple(tokenizer.encode_chat(messages, timestamp_ms=date_ms, max_tokens=max_tokens))
