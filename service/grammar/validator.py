"""Validates grammars: a grammar reaches the engine only after it has compiled in a process that can be killed."""

import asyncio
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from kernels.grammar import LIMITS, GrammarError, Grammars, TokenVocabulary, short_error
from service.errors import InternalError, JobError
from service.grammar.formats import Grammar, grammar_of
from service.text.tokenizer import Tokenizer
from service.wire import Job
from service.wire.limits import MAX_SHOWN_CHARS

log = structlog.get_logger(__name__)

_SANDBOX: Final = Path(__file__).with_name("sandbox.py")
_MAX_ANSWER_BYTES: Final = 1 << 20
"""llguidance's messages repeat the grammar (at most 64 KiB) a few times over."""

_ONE_OF: Final = "oneOf constraints are not supported"
_ONE_OF_ADVICE: Final = "oneOf is followed only where no value can match two of its schemas; anyOf always is"
"""Replaces llguidance's advice to set one of its options, which a job cannot do."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on the cost of compiling one grammar.

    Common grammars compile in 1 to 30 ms; a schema of 1,500 optional properties takes 0.2 s.
    """

    cpu_s: float = 1.0
    """Processor time for one grammar, so that a busy machine does not refuse good grammars."""
    wall_s: float = 30.0
    """Wall-clock time for a sandbox that gets no processor time, and for starting one."""
    memory_bytes: int = 1 << 30
    max_verdicts: int = 256
    """Verdicts that are kept. Each takes a grammar's text (at most 64 KiB) and a line: 16 MiB together."""


def load_grammars(tokenizer: Tokenizer, eos_token_ids: AbstractSet[int], vocab_size: int) -> Grammars | None:
    """Give a loaded model's vocabulary to the grammar library. Takes about 0.3 s.

    Returns None for a model that knows no end of sequence: no grammar could end there.
    """
    if not eos_token_ids:
        return None
    # An end id is never text, even where the model's files do not mark it as special.
    token_bytes = [
        b"" if token_id in eos_token_ids else tokenizer.token_bytes(token_id)
        for token_id in range(tokenizer.vocab_size)
    ]
    return Grammars(TokenVocabulary(token_bytes, frozenset(eos_token_ids)), vocab_size)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says what is wrong with a grammar."""

    reason: str
    limit: str | None = None
    """The limit that the grammar exceeds. None: the grammar itself is wrong."""


class GrammarValidator:
    """Validates one grammar at a time, in arrival order. Event loop only.

    A bad grammar delays later ones by `cpu_s` at most.
    """

    def __init__(self, grammars: Grammars | None, limits: GrammarLimits = GrammarLimits()) -> None:
        """`grammars` is None for a model that knows no end of sequence: every job with a grammar is refused."""
        self._grammars = grammars
        self._limits = limits
        self._sandbox = _Sandbox(limits)
        self._lock = asyncio.Lock()
        self._verdicts: OrderedDict[str, Refusal | None] = OrderedDict()

    async def admit(self, job: Job) -> str | None:
        """Return the text of the job's grammar, compiled and ready for the engine; None for plain text.

        Raises JobError for a grammar that is refused, InternalError when the sandbox does not start.
        """
        grammar = grammar_of(job.response_format, job.id)
        if grammar is None:
            return None
        kind = job.response_format.type
        if self._grammars is None:
            raise JobError(
                "not_supported", f"response_format.type: {kind!r} is not served by this model; it may be 'text'",
                field="response_format.type", value=kind, limit="text", job_id=job.id,
            )  # fmt: skip
        if job.ignore_eos:
            raise JobError(
                "invalid_value", f"ignore_eos: true, but output of the type {kind!r} has an end; it may be false",
                field="ignore_eos", value="true", limit="false", job_id=job.id,
            )  # fmt: skip
        refusal = await self._verdict(grammar.text)
        if refusal is None:
            refusal = await asyncio.to_thread(_refusal, self._grammars.prepare, grammar.text)
        if refusal is not None:
            raise _refused(grammar, refusal, job.id)
        return grammar.text

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.end()

    async def _verdict(self, text: str) -> Refusal | None:
        async with self._lock:
            if text in self._verdicts:
                self._verdicts.move_to_end(text)
                return self._verdicts[text]
            verdict = self._verdicts[text] = await self._sandbox.run(text)
            if len(self._verdicts) > self._limits.max_verdicts:
                self._verdicts.popitem(last=False)
            return verdict


def _refused(grammar: Grammar, refusal: Refusal, job_id: str) -> JobError:
    shown = grammar.source[:MAX_SHOWN_CHARS]
    advice = "" if refusal.limit is None else f"; it must be one that {refusal.limit}"
    return JobError(
        "invalid_grammar", f"{grammar.field}: {refusal.reason} ({shown!r}){advice}", field=grammar.field,
        value=shown, limit=refusal.limit or grammar.limit, job_id=job_id,
    )  # fmt: skip


def _refusal(prepare: Callable[[str], None], text: str) -> Refusal | None:
    try:
        prepare(text)
    except GrammarError as error:
        return Refusal(str(error))
    return None


class _Sandbox:
    """The child process that compiles grammars: started when it is first needed, and again after it ended."""

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, text: str) -> Refusal | None:
        """Return what is wrong with the grammar, or None. Raises InternalError when the process does not start."""
        process = self._process or await self._start()
        try:
            async with asyncio.timeout(self._limits.wall_s):
                assert process.stdin is not None
                process.stdin.write(json.dumps(text).encode() + b"\n")
                await process.stdin.drain()
                answer = await self._answer(process)
        except (ConnectionError, EOFError):
            return await self._died(process)
        except TimeoutError:
            await self.end()
            return Refusal("it did not compile in time", f"compiles within {self._limits.wall_s:g} s")
        except BaseException:
            # The answer may still come, and must not be taken for the next grammar's.
            await asyncio.shield(self.end())
            raise
        if answer is None:
            return None
        return Refusal(_ONE_OF_ADVICE if answer.startswith(_ONE_OF) else short_error(answer))

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        limits = {
            "initial_lexer_fuel": LIMITS.initial_lexer_fuel,
            "step_lexer_fuel": LIMITS.step_lexer_fuel,
            "max_lexer_states": LIMITS.max_lexer_states,
            "step_max_items": LIMITS.step_max_items,
        }
        arguments = (str(self._limits.cpu_s), str(self._limits.memory_bytes), json.dumps(limits))
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(_SANDBOX), *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                limit=_MAX_ANSWER_BYTES,
            )  # fmt: skip
            async with asyncio.timeout(self._limits.wall_s):
                await self._answer(process)
        except (OSError, EOFError) as error:
            await self.end()
            raise InternalError(f"the process that compiles grammars did not start: {error!r}") from error
        except BaseException:
            await asyncio.shield(self.end())
            raise
        return process

    async def _answer(self, process: asyncio.subprocess.Process) -> str | None:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: str | None = json.loads(line)
        return answer

    async def _died(self, process: asyncio.subprocess.Process) -> Refusal:
        await process.wait()
        self._process = None
        log.warning("grammar_process_ended", returncode=process.returncode)
        limits = self._limits
        limit = f"compiles in {limits.cpu_s:g} s and {limits.memory_bytes >> 20} MiB"
        if process.returncode == -signal.SIGPROF:
            return Refusal(f"it took more than {limits.cpu_s:g} s of processor time to compile", limit)
        return Refusal("it ended the process that compiled it", limit)
