"""The detokenizer: what it releases token by token is what all the bytes together give."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random

import tokenizers

from service.text import ByteTokenizer, Detokenizer
from service.text.tokenizer import ModelTokenizer, Tokenizer
from tests.fuzz.target import Outcome, Target, expect
from tests.service.text.tiny import byte_level, sentencepiece_like

KINDS = ("bytes", "byte_level", "sentencepiece")
PIECES: tuple[str | bytes, ...] = (
    *("a", "ab", "é", "世界", "👋🏽\u200d", "\ufffd", "\x00", " ", "\ufeff", "<think>", "the"),
    *(
        b"\xff",
        b"\xc3",
        b"\xe4\xb8",
        b"\xf0\x9f\x91",
        b"\x80",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
    ),
    *(b"\xe0\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xed\xaf", b"\xf0\x80", b"\xe2\x82\xe2\x82\xac"),
)
STOPS = ("a", "ab", "b", "aa", "\ufffd", "界", "é", " t", "\x00", "</think>", "aba")


@cache
def tokenizer_of(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer | None]:
    """One of each kind, and the library's own."""
    if kind == "bytes":
        return ByteTokenizer(), None
    theirs = byte_level() if kind == "byte_level" else sentencepiece_like()
    return ModelTokenizer(theirs, chat_template=None, end_token_ids=frozenset()), theirs


@cache
def ids_of_bytes(kind: str) -> tuple[int, ...]:
    """Of each byte, the id of the token that is this byte alone."""
    tokenizer, _ = tokenizer_of(kind)
    found = {
        tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size - 1, -1, -1)
    }
    if kind == "sentencepiece":  # a letter may have a token beside that of its byte
        return tuple(range(3, 259))
    return tuple(found[bytes([byte])] for byte in range(256))


@dataclass(frozen=True)
class Tokens:
    kind: str
    token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    min_tokens: int
    hidden: frozenset[int]
    groups: tuple[int, ...]
    """Where one call of `feed` ends and the next begins."""


@dataclass(frozen=True)
class Detokenizers(Target):
    name = "detokenizer"
    share = 0.5
    detokenizer: Callable[..., Detokenizer] = Detokenizer

    def make(self, rng: Random) -> Tokens:
        kind = rng.choice(KINDS)
        size = tokenizer_of(kind)[0].vocab_size
        token_ids: list[int] = []
        for _ in range(rng.randrange(14)):
            choice = rng.random()
            if choice < 0.5:
                piece = rng.choice(PIECES)
                data = piece.encode() if isinstance(piece, str) else piece
                token_ids += [ids_of_bytes(kind)[byte] for byte in data]
            elif choice < 0.9:
                token_ids.append(rng.randrange(size))
            else:
                token_ids.append(rng.choice((-1, size, size - 1, 0, 1, 2, 2**31 - 1, 2**40)))
        stop = tuple(rng.sample(STOPS, rng.choice((0, 0, 1, 3))))
        groups = tuple(sorted(rng.randrange(len(token_ids) + 1) for _ in range(rng.randrange(4))))
        hidden = frozenset(rng.sample(token_ids, 1)) if token_ids and rng.random() < 0.2 else frozenset()
        return Tokens(kind, tuple(token_ids), stop, rng.choice((0, 0, 0, 1, 5)), hidden, groups)

    def check(self, case: Tokens) -> Outcome:
        tokenizer, theirs = tokenizer_of(case.kind)
        strip = case.kind == "sentencepiece"
        shown = [b"" if i in case.hidden else tokenizer.token_bytes(i) for i in case.token_ids]
        expected = by_definition(shown, case.stop, case.min_tokens, strip=strip)
        single, grouped = self._new(case), self._new(case)
        texts = [""]
        for token_id in case.token_ids:
            single.feed([token_id])
            texts.append(single.text)
        places = [0, *case.groups, len(case.token_ids)]
        for begin, end in pairwise(places):
            grouped.feed(case.token_ids[begin:end])
            expect(grouped.text == texts[end], "the text depends on the grouping", grouped.text, texts[end])
        expect(
            single.finish() == grouped.finish(), "the rest depends on the grouping", single.text, grouped.text
        )
        expect(single.text == expected, "not what the bytes give", single.text, expected)
        expect(all(single.text.startswith(text) for text in texts), "took text back", texts, single.text)
        if theirs is not None and not case.stop and not case.hidden:
            self._compare(case, theirs, b"".join(shown), single.text)
        return Outcome.ACCEPTED

    def _new(self, case: Tokens) -> Detokenizer:
        return self.detokenizer(
            tokenizer_of(case.kind)[0].token_bytes,
            stop=case.stop,
            min_tokens=case.min_tokens,
            hidden_token_ids=case.hidden,
            strip_leading_space=case.kind == "sentencepiece",
        )

    def _compare(self, case: Tokens, theirs: tokenizers.Tokenizer, data: bytes, text: str) -> None:
        """Where the bytes are valid, the library writes the same text."""
        try:
            data.decode()
        except UnicodeDecodeError:
            return
        known = [i for i in case.token_ids if 0 <= i < theirs.get_vocab_size()]
        expect(
            theirs.decode(known, skip_special_tokens=True) == text, "another text than the library's", text
        )


def by_definition(shown: list[bytes], stop: tuple[str, ...], min_tokens: int, *, strip: bool) -> str:
    """Decode everything at once, then cut at the stop string that is complete first after `min_tokens` tokens."""
    data = b"".join(shown)
    if strip:
        data = data.removeprefix(b" ")
    text = data.decode("utf-8", errors="replace")
    if not stop:
        return text
    first = num_chars_after(shown, min_tokens, strip=strip)
    for end in range(first + 1, len(text) + 1):
        found = [each for each in stop if text.endswith(each, 0, end)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def num_chars_after(shown: list[bytes], num_tokens: int, *, strip: bool) -> int:
    """Return how many characters are certain after so many tokens: all but an unfinished one at the end."""
    data = b"".join(shown[:num_tokens])
    data = data.removeprefix(b" ") if strip else data
    if num_tokens >= len(shown):
        return len(data.decode("utf-8", errors="replace"))  # nothing can complete it
    for num_open in range(min(3, len(data)), 0, -1):
        if is_unfinished(data[-num_open:]):
            data = data[:-num_open]
            break
    return len(data.decode("utf-8", errors="replace"))


def is_unfinished(data: bytes) -> bool:
    """Tell whether `data` is the beginning of one character, or of half a surrogate pair, whose end Python's decoder
    awaits too."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if len(data) == 2 and data[0] == 0xED and 0xA0 <= data[1] <= 0xBF:
            return True
        return error.start == 0 and error.end == len(data) and error.reason == "unexpected end of data"
    return False
