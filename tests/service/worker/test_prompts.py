"""A short prompt never waits for a long one."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest

from service.errors import JobError
from service.text import ByteTokenizer, ChatMessages
from service.wire import Job, parse_job
from service.worker.specs import LONG_TEXT_CHARS, PromptEncoder, TextLanes

LONG = "x" * (LONG_TEXT_CHARS + 1)


class Stuck(ByteTokenizer):
    """Long texts take until they may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.begun: list[int] = []

    def encode_prompt(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        self.begun.append(len(text))
        if len(text) > LONG_TEXT_CHARS:
            assert self.may_go_on.wait(30)
        return super().encode_prompt(text, max_tokens=max_tokens)

    def encode_chat(
        self, messages: ChatMessages, *, timestamp_ms: int | None = None, max_tokens: int | None = None
    ) -> list[int]:
        return self.encode_prompt("".join(message["content"] for message in messages), max_tokens=max_tokens)


def job(**fields: object) -> Job:
    return parse_job(orjson.dumps({"id": "a"} | fields), key=None, timestamp_ms=0)


async def test_short_prompts_do_not_wait_for_long_ones() -> None:
    tokenizer = Stuck()
    half = {"role": "user", "content": LONG[: len(LONG) // 2 + 1]}
    with ThreadPoolExecutor(1) as short, ThreadPoolExecutor(1) as long:
        prompts = PromptEncoder(tokenizer, TextLanes(short, long), max_tokens=1 << 20)
        long_jobs = [job(prompt=LONG), job(messages=[half, half]), job(prompt=LONG)]
        waiting = [asyncio.create_task(prompts.encode(each, 0)) for each in long_jobs]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                for fields in (
                    {"prompt": "hi"},
                    {"prompt": LONG[:-1]},
                    {"prompt_token_ids": [1] * len(LONG)},
                ):
                    await prompts.encode(job(**fields), 0)
                assert await prompts.encode(job(messages=[half]), 0)
            assert not any(task.done() for task in waiting)
        finally:
            tokenizer.may_go_on.set()
        lengths = [len(ids) for ids in await asyncio.gather(*waiting)]
    assert lengths == [len(LONG), 2 * len(half["content"]), len(LONG)]
    assert [length for length in tokenizer.begun if length > LONG_TEXT_CHARS] == lengths, (
        "in order of arrival"
    )


async def test_long_text_that_can_never_fit_is_refused_and_a_short_one_is_counted() -> None:
    with ThreadPoolExecutor(1) as short, ThreadPoolExecutor(1) as long:
        prompts = PromptEncoder(ByteTokenizer(), TextLanes(short, long), max_tokens=100)
        with pytest.raises(JobError, match="prompt: 900000 characters is above the limit 100 ") as refused:
            await prompts.encode(job(prompt="a" * 900_000), 0)
        assert (refused.value.code, refused.value.value, refused.value.limit) == ("infeasible", 900_000, 100)
        with pytest.raises(JobError, match="messages: "):
            await prompts.encode(job(messages=[{"role": "user", "content": LONG}]), 0)
        assert len(await prompts.encode(job(prompt=LONG[:-1]), 0)) == LONG_TEXT_CHARS
