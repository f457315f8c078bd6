"""Turns a job's text into its prompt's token ids, off the event loop."""

import asyncio
from concurrent.futures import Executor
from typing import Final, NamedTuple

from service.text.tokenizer import Tokenizer
from service.wire import Job

LONG_TEXT_CHARS: Final = 1 << 14
"""Takes about 10 ms, during which later jobs wait; a full record of 1 MiB takes a second."""


class TextLanes(NamedTuple):
    """One thread each, so that texts are tokenized in order of arrival."""

    short: Executor
    long: Executor


class PromptEncoder:
    """Renders templates and tokenizes. Long texts wait for each other; a short one waits only for short ones."""

    def __init__(self, tokenizer: Tokenizer, lanes: TextLanes, *, max_tokens: int) -> None:
        """`max_tokens` is the model's length, the limit of a prompt."""
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._max_tokens = max_tokens

    async def encode(self, job: Job, date_ms: int) -> tuple[int, ...]:
        """Return the prompt's ids. Raises JobError when the model's template refuses the prompt or it exceeds the
        model's length."""
        is_long = _num_chars(job) > LONG_TEXT_CHARS
        lane = self._lanes.long if is_long else self._lanes.short
        # A short text that does not fit is tokenized, so that the scheduler's refusal can name its tokens.
        max_tokens = self._max_tokens if is_long else None
        return await asyncio.get_running_loop().run_in_executor(
            lane, encode_prompt, job, self._tokenizer, date_ms, max_tokens
        )


def _num_chars(job: Job) -> int:
    return len(job.prompt or "") + sum(len(message.content) for message in job.messages or ())


def encode_prompt(job: Job, tokenizer: Tokenizer, date_ms: int, max_tokens: int | None) -> tuple[int, ...]:
    """Return the prompt's ids; runs off the event loop.

    A template that prints the date prints that of `date_ms`. Raises JobError; with `max_tokens` at once for a text
    that cannot fit.
    """
    if job.prompt_token_ids is not None:
        return tuple(job.prompt_token_ids)
    if job.prompt is not None:
        return tuple(tokenizer.encode_prompt(job.prompt, max_tokens=max_tokens))
    messages = job.template_messages()
    return tuple(tokenizer.encode_chat(messages, timestamp_ms=date_ms, max_tokens=max_tokens))
