"""What handling a job's output costs from its tokens to its result and back to its reader, counted, not timed."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import orjson
import pytest

from scheduler.spec import FinishReason
from service.ingest.delivery import Delivery
from service.stream.assemble import Fed, ResumedChoice, StreamAssembler
from service.stream.keys import APPEND, AppendReply, Attempt
from service.stream.writer import AttemptWriter
from service.text import load_tokenizer
from service.wire.common import TokenLogprob
from service.wire.decode import parse_job
from service.wire.event import Delta, Start
from service.worker.job_run import ChoiceRun, JobRun
from service.worker.outcome import result_of
from tests.support.configs import stream_config
from tests.support.cost import count_calls, peak_bytes
from tests.support.streams import COMPLETED, DIGEST

JOB = "job-1"
STOP = ("never to be found", "wheel\n\n\n")
LINEAR = 2.2
"""Twice the output may cost so many times as much."""
SIZES = (1_000, 2_000, 4_000)


class Output:
    """Runs one job through detokenizer and stream writer, one token per step."""

    def __init__(self) -> None:
        value = orjson.dumps({"id": JOB, "prompt": "p", "return_token_ids": True, "logprobs": 0})
        delivery = Delivery("jobs", 0, 7, 1, None, value, (), 0)
        self.run = JobRun.begin(delivery, now_s=0.0, wall_s=1e9)
        self.run.job = parse_job(value, key=None, timestamp_ms=0)
        self.choice = ChoiceRun(0, JOB, load_tokenizer(None).detokenizer([], STOP), frozenset())
        self.run.choices = [self.choice]
        attempt = Attempt(JOB, 1, "w", "jobs/0/1", DIGEST, streamed=True)
        self.writer = AttemptWriter(
            attempt,
            (ResumedChoice(),),
            stream_config(),
            APPEND,
            mark=lambda _: None,
            on_closed=lambda _: None,
        )

    def add(self, num_tokens: int) -> None:
        for number in range(num_tokens):
            token_id = b"the wheel\n"[number % 10]
            text = self.choice.take((token_id,))
            logprobs = (TokenLogprob(text, token_id, -0.5, ()),)
            self.choice.logprobs.extend(logprobs)
            self.writer.delta(0, text, (token_id,), logprobs)
            self.writer.command()
            self.writer.acknowledge(AppendReply.WRITTEN)

    def end(self) -> bytes:
        """The job's result."""
        self.choice.finish = FinishReason.LENGTH
        self.choice.close()
        record = result_of(self.run, "completed", worker="w", now_s=9.0).encode()
        asyncio.run(self._decide_and_end(record))
        return record

    async def _decide_and_end(self, record: bytes) -> None:
        for waiting in (self.writer.decide(record), self.writer.end(COMPLETED)):
            task = asyncio.create_task(waiting)
            await asyncio.sleep(0)
            self.writer.command()
            self.writer.acknowledge(AppendReply.WRITTEN)
            assert await task


def whole_job(num_tokens: int) -> None:
    output = Output()
    output.add(num_tokens)
    result = orjson.loads(output.end())
    assert len(result["choices"][0]["token_ids"]) == num_tokens


def merged_job(num_tokens: int) -> None:
    """A Redis that answers nothing until the end: everything merges into one delta."""
    output = Output()
    for _ in range(num_tokens):
        output.writer.delta(0, "x", (7,))
    output.writer.command()


def read_stream(num_tokens: int) -> None:
    assembler = StreamAssembler(JOB)
    assembler.feed(Start(JOB, 1, (0,)))
    for number in range(num_tokens):
        assert assembler.feed(Delta(JOB, 1, number + 1, 0, "x", (7,))) is Fed.APPLIED
    assert len(assembler.texts()[0]) == num_tokens


@pytest.mark.parametrize("work", [whole_job, merged_job, read_stream])
def test_hazard_output_handling_is_linear_in_output_length(work: Callable[[int], None]) -> None:
    calls = [count_calls(work, num_tokens) for num_tokens in SIZES]
    assert all(longer <= LINEAR * shorter for shorter, longer in pairwise(calls)), calls


def test_hazard_no_token_copies_the_earlier_output() -> None:
    """A copy of 16,000 tokens takes 128 KB, of their text 16 KB; a list grows now and then, not at every token."""
    output = Output()
    output.add(100)
    early = peak_bytes(output.add, 8)
    output.add(16_000)
    late = min(peak_bytes(output.add, 8) for _ in range(8))
    assert late < early + 4_000, (early, late)


def test_held_back_text_is_bounded_by_the_longest_stop_string() -> None:
    output = Output()
    for _ in range(3_000):
        output.choice.take(b"never to be foun")
        assert output.choice.detokenizer.num_held_chars < max(map(len, STOP))
