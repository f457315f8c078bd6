"""Constrained decoding: which tokens may follow, given a grammar and what a request has generated so far.

Grammars are given in llguidance's own JSON. Nothing here needs torch, so every runner can use it.

Compiling is unbounded for some schemas (`multipleOf` builds an automaton of that many states), so a grammar must first
have been compiled in a process that can be killed. Masks are bounded twice: LIMITS stop one that explodes, and a budget
of processor time per request stops one that is slow at every token.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from scheduler.plan import ScheduledRow

LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,
    step_max_items=20_000,
    verbose_errors=False,
)
"""Measured with 49,152 tokens: masks of all JSON schema formats need at most 10 ms, and a regex of a million copies
is given up after 0.16 s (llguidance's defaults: 0.9 s). A lexer state takes 1 to 2 kB, so a grammar at most 100 MB."""

CPU_BUDGET_S: Final = 0.25
CPU_BUDGET_PER_TOKEN_S: Final = 0.005
"""Processor time, not wall time: a busy machine must not end jobs. Usual masks take 0.01 to 0.1 ms."""

MAX_TEMPLATES: Final = 64
MAX_USES: Final = 64
"""Requests that share one compiled grammar. They share its lexer states too, which only grow."""

_MAX_TOKEN_BYTES: Final = 64
"""Length of the longest token tried when forced text is tokenized; longer ones are never needed for that."""

_CEILING_OF_BYTE: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, np.inf, -np.inf
).astype(np.float32)
"""[256, 8]"""


class GrammarError(Exception):
    """One request's grammar cannot be compiled or followed. The text is for the job's owner."""


@dataclass(frozen=True, slots=True)
class TokenVocabulary:
    """The text of each token id, independent of any tokenizer library."""

    token_bytes: Sequence[bytes]
    """Indexed by id; empty for special tokens, which no grammar allows."""
    eos_token_ids: frozenset[int]
    """Allowed exactly where the grammar may end."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """The tokens that may come next."""

    words: npt.NDArray[np.int32]
    """[ceil(vocab_size / 32)], the lowest bit first."""
    vocab_size: int

    def unpacked(self) -> npt.NDArray[np.bool_]:
        """Return [vocab_size] bool."""
        bits = np.unpackbits(self.words.view(np.uint8), count=self.vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def ceiling(self) -> npt.NDArray[np.float32]:
        """Return [vocab_size] float32: infinity where a token is allowed, minus infinity where not.

        Taking the minimum of this and the logits is four times as fast as writing into the logits by a boolean mask.
        """
        return _CEILING_OF_BYTE.take(self.words.view(np.uint8), axis=0).reshape(-1)[: self.vocab_size]

    def is_within(self, token_ids: Iterable[int]) -> bool:
        """Whether every allowed token is one of these."""
        return set(self.unpacked().nonzero()[0].tolist()).issubset(token_ids)


class Grammars:
    """Compiled grammars of one vocabulary. `prepare` on any thread, `matcher` and `forget` on the step thread."""

    def __init__(self, vocabulary: TokenVocabulary, vocab_size: int) -> None:
        """Takes about 0.2 s. vocab_size: the model's; ids beyond the tokenizer's are never allowed.

        Raises GrammarError for a vocabulary without an end-of-sequence token."""
        tokens = [bytes(token) for token in vocabulary.token_bytes[:vocab_size]]
        tokens += [b""] * (vocab_size - len(tokens))
        ends = sorted(token_id for token_id in vocabulary.eos_token_ids if token_id < vocab_size)
        if not ends:
            raise GrammarError("the vocabulary has no end-of-sequence token, so no grammar could end")
        self.vocab_size = vocab_size
        wrapped = TokenizerWrapper(_GreedyTokenizer(tokens, ends[0]))
        self._tokenizer = LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=ends)
        self.end_token_ids: Final = frozenset(ends)
        self.end_mask: Final = _mask_of(ends, vocab_size)
        """Allows only the end-of-sequence tokens."""
        self._templates: OrderedDict[str, _Template] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, text: str) -> None:
        """Compile ahead of the step thread. Raises GrammarError when the grammar cannot be compiled."""
        with self._lock:
            template = self._templates.get(text)
            if template is not None and template.num_uses < MAX_USES:
                template.num_uses += 1
                return
        matcher = self._compile(text)  # This releases the GIL.
        with self._lock:
            self._templates[text] = _Template(matcher)
            self._templates.move_to_end(text)
            while len(self._templates) > MAX_TEMPLATES:
                self._templates.popitem(last=False)

    def matcher(self, text: str) -> LLMatcher:
        """Return a matcher at the start of the grammar. Raises GrammarError when compiling it, if needed, fails."""
        with self._lock:
            template = self._templates.get(text)
        if template is None:
            self.prepare(text)
            with self._lock:
                template = self._templates[text]
        return template.matcher.deep_copy()

    def forget(self, text: str) -> None:
        """Drop a compiled grammar: its lexer may be what failed, and the next request must not inherit that."""
        with self._lock:
            self._templates.pop(text, None)

    def _compile(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(short_error(matcher.get_error()))
        return matcher


@dataclass(slots=True)
class _Template:
    matcher: LLMatcher
    num_uses: int = 1


class GrammarSlots:
    """The matchers of running requests, by slot. Step thread only.

    A matcher is brought up to the row's `num_generated_tokens` when the row comes, not when a token is sampled:
    a step that is run again, or whose token never counted, finds it as it was.
    """

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._slots: dict[int, _Slot] = {}

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def mask(self, row: ScheduledRow) -> TokenMask:
        """Return the tokens that may follow in a row with a grammar. Raises GrammarError, which fails that row alone.

        End-of-sequence tokens are allowed exactly where the output may end. After one, only they are allowed: such a
        row was planned before its token was known, and its own token does not count.
        """
        if self._grammars is None:
            raise GrammarError("response_format needs a vocabulary, which was not loaded")
        assert row.sampling is not None
        text = row.sampling.grammar
        assert text is not None, f"request {row.request_id}: a row without grammar"
        started_s = time.thread_time()
        try:
            slot = self._advance(row, text, self._grammars)
            if slot.has_ended:
                return self._grammars.end_mask
            words = slot.matcher.compute_bitmask()
            _check(slot.matcher)
        except GrammarError:
            self._grammars.forget(text)
            raise
        slot.spent_s += time.thread_time() - started_s
        if slot.spent_s > CPU_BUDGET_S + CPU_BUDGET_PER_TOKEN_S * (row.num_generated_tokens + 1):
            raise GrammarError(
                f"response_format took {slot.spent_s:.2f} s of processor time for {row.num_generated_tokens + 1} "
                f"tokens; the limit is {CPU_BUDGET_S} s and {CPU_BUDGET_PER_TOKEN_S} s for each token"
            )
        return TokenMask(np.frombuffer(words, dtype=np.int32), self._grammars.vocab_size)

    def _advance(self, row: ScheduledRow, text: str, grammars: Grammars) -> "_Slot":
        slot = self._slots.get(row.slot)
        if row.history is not None:
            slot = self._slots[row.slot] = _Slot(row.request_id, grammars.matcher(text), grammars)
            slot.consume(row.history[1])
        assert slot is not None, (
            f"request {row.request_id}: a grammar without history in its first sampling row"
        )
        assert slot.request_id == row.request_id, (
            f"slot {row.slot} is {slot.request_id}'s, not {row.request_id}'s"
        )
        if slot.num_consumed == row.num_generated_tokens - 1:
            slot.consume(row.token_ids[-1:])
        assert slot.num_consumed == row.num_generated_tokens, (
            f"request {row.request_id}: {slot.num_consumed} tokens in its grammar of {row.num_generated_tokens}"
        )
        return slot


@dataclass(slots=True)
class _Slot:
    request_id: str
    matcher: LLMatcher
    grammars: Grammars
    num_consumed: int = 0
    spent_s: float = 0.0
    has_ended: bool = False
    """An end token came where the text was complete. The matcher never sees it: it may have stopped by itself."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Raises GrammarError, now and from then on, when the tokens break the grammar."""
        vocab_size, ends = self.grammars.vocab_size, self.grammars.end_token_ids
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise GrammarError(f"a token so far is outside the vocabulary of {vocab_size} tokens")
        num_text = next((i for i, token_id in enumerate(token_ids) if token_id in ends), len(token_ids))
        if num_text:
            self._consume_text(token_ids[:num_text])
        if num_text < len(token_ids):
            self._consume_ends(token_ids[num_text:])
        self.num_consumed += len(token_ids)

    def _consume_text(self, token_ids: Sequence[int]) -> None:
        if self.has_ended or not self.matcher.consume_tokens(list(token_ids)):
            error = short_error(self.matcher.get_error()) or "the text is already complete"
            raise GrammarError(f"the tokens so far do not follow response_format: {error}")

    def _consume_ends(self, token_ids: Sequence[int]) -> None:
        if not self.grammars.end_token_ids.issuperset(token_ids):
            raise GrammarError("the tokens so far go on after their end")
        if not self.matcher.is_accepting():
            raise GrammarError("the tokens so far end before response_format is complete")
        self.has_ended = True


def _mask_of(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    return TokenMask(words, vocab_size)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(f"response_format cannot be followed: {short_error(matcher.get_error())}")


def short_error(message: str, max_chars: int = 200) -> str:
    """Return the line that names the problem; llguidance repeats whole grammars around it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if lines and lines[0].startswith("NoExtension"):
        return "no text matches it"
    line = told[-1] if told else lines[0] if lines else ""
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


class _GreedyTokenizer:
    """The tokenizer that llguidance needs: the tokens, and how text that a grammar forces is tokenized.

    Taking the longest token is enough: it only decides which of several equal spellings of forced text is generated.
    """

    bos_token_id: int | None = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self._id_of = {token: token_id for token_id, token in enumerate(tokens) if token}
        self._longest = min(_MAX_TOKEN_BYTES, max(map(len, tokens), default=1))

    def __call__(self, text: bytes) -> list[int]:
        token_ids, start = [], 0
        while start < len(text):
            for stop in range(min(len(text), start + self._longest), start, -1):
                token_id = self._id_of.get(text[start:stop])
                if token_id is not None:
                    token_ids.append(token_id)
                    start = stop
                    break
            else:
                break  # No token begins like this: the row will fail because its grammar cannot be followed.
        return token_ids
