"""Bounds the number of tokens of a text from below, without tokenizing it."""

import unicodedata
from typing import Any, Final, Literal

import tokenizers
from tokenizers import models

from service.errors import JobError
from service.text.vocabulary import BYTE_LEVEL_ALPHABET, steps_of

_KEEPING_PRE_TOKENIZERS: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})
"""Pre-tokenizers that cut text and remove nothing of it unless their options say so."""
_KEEPING_NORMALIZERS: Final = frozenset({"Prepend", "NFD", "NFKD", "ByteLevel"})
_COMPOSING_NORMALIZERS: Final[tuple[Literal["NFC", "NFKC"], ...]] = ("NFC", "NFKC")
"""Normalizers that join up to four characters into one."""
_CONTINUING_BYTES: Final = frozenset(range(0x80, 0xC0))
"""Every character beyond ASCII has one of these bytes, so it gives a token where the vocabulary knows them all."""


class TextBound:
    """Refuses a text that must have too many tokens: no token holds more characters than the vocabulary's longest name.

    The bound holds where every character of a text goes into some token. A tokenizer that may drop characters, or turn
    many into one unknown token, has no bound.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Analyse the tokenizer, which takes a tenth of a second for a large vocabulary."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder().values()
        steps = steps_of(tokenizer)
        normalizers, pre_tokenizers = steps["normalizer"], steps["pre_tokenizer"]
        forms = [form for step in normalizers for form in _COMPOSING_NORMALIZERS if step["type"] == form]
        self._form = forms[0] if forms else None
        self._swallows_space = any(token.lstrip or token.rstrip for token in added)
        unknown = _unknown_bytes(tokenizer, vocabulary, [*pre_tokenizers, *normalizers])
        self._lost = [chr(byte) for byte in sorted(unknown or ()) if byte < 0x80]
        """Characters that give no token: some vocabularies lack a few control characters."""
        keeps_all = (
            unknown is not None
            and unknown.isdisjoint(_CONTINUING_BYTES)
            and len(forms) <= 1
            and all(map(_normalizer_keeps_all, normalizers))
            and all(map(_pre_tokenizer_keeps_all, pre_tokenizers))
        )
        self.max_chars_per_token: int | None = max(map(len, vocabulary), default=1) if keeps_all else None
        """None when there is no bound."""

    def check(self, field: str, text: str, max_tokens: int) -> None:
        """Raise JobError for a text that has more than `max_tokens` tokens, however it is tokenized."""
        per_token = self.max_chars_per_token
        if per_token is not None and self._exceeds(text, max_tokens * per_token):
            raise too_long(field, len(text), max_tokens, per_token)

    def _exceeds(self, text: str, max_chars: int) -> bool:
        """Tell whether the tokenizer sees more than `max_chars` characters of `text`."""
        if len(text) <= max_chars:
            return False
        if self._form is not None:
            text = unicodedata.normalize(self._form, text)
        num_lost = sum(map(text.count, self._lost))
        if self._swallows_space:
            return sum(map(len, text.split())) - num_lost > max_chars
        return len(text) - num_lost > max_chars


def too_long(field: str, num_chars: int, max_tokens: int, max_chars_per_token: int) -> JobError:
    """Make the error for a text that cannot fit in `max_tokens`."""
    limit = max_tokens * max_chars_per_token
    return JobError(
        "infeasible",
        f"{field}: {num_chars} characters is above the limit {limit} "
        f"({max_tokens} tokens of at most {max_chars_per_token} characters)",
        field=field, value=num_chars, limit=limit,
    )  # fmt: skip


def _normalizer_keeps_all(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return step["type"] in _KEEPING_NORMALIZERS or step["type"] in _COMPOSING_NORMALIZERS


def _pre_tokenizer_keeps_all(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"


def _unknown_bytes(
    tokenizer: tokenizers.Tokenizer, vocabulary: dict[str, int], steps: list[dict[str, Any]]
) -> set[int] | None:
    """Return the bytes that have no token; None for a vocabulary that does not count in bytes."""
    if not isinstance(tokenizer.model, models.BPE):
        return None
    if tokenizer.model.byte_fallback:
        names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    else:
        if not any(step["type"] == "ByteLevel" for step in steps):
            return None
        names = {byte: letter for letter, byte in BYTE_LEVEL_ALPHABET.items()}
    return {byte for byte, name in names.items() if name not in vocabulary}
