"""Maps token ids to bytes."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import models

from service.errors import SettingsError
from service.wire.common import token_name

_INNER_NAMES: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
}
"""The key under which a sequence of each kind lists its steps."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")


def _byte_level_alphabet() -> dict[str, int]:
    """Map characters to bytes as byte-level BPE does: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + position): byte for position, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


class Vocabulary:
    """Knows the bytes of every token, and keeps them by id (at most one entry per id of the vocabulary).

    Decoding only joins the bytes and decodes them as UTF-8. For a run of byte tokens that is not UTF-8, some
    tokenizers write one U+FFFD per byte, even for valid characters of the run. That would have to wait for the
    end of the run, so here only invalid bytes become U+FFFD.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self.size = max(tokenizer.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 1)
        self.special: Mapping[int, str] = {i: token.content for i, token in added.items() if token.special}
        """Special tokens, which have no text."""
        self.markers = [
            token.content for token in added.values() if token.special or _is_marker(token.content)
        ]
        """Names that a message's text may not turn into: special tokens, and tokens written like one, since converters
        mark some turn tokens as ordinary. Ordinary added tokens such as `<think>` are not among them."""
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        self._byte_level = "ByteLevel" in kinds
        self._byte_tokens = "ByteFallback" in kinds
        self._replacements = [
            _replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")
        ]
        self.strips_leading_space = "Strip" in kinds or any(
            step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps
        )
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special, b"")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id; none for a special token or an id that the vocabulary lacks."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.size else None
            known = self._bytes_of(token) if token is not None else b""
            if 0 <= token_id < self.size:
                self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """Return one token's text to show: special tokens by name, parts of characters by their bytes."""
        name = self.special.get(token_id)
        return name if name is not None else token_name(self.token_bytes(token_id))

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            # Added tokens are not written in this alphabet.
            codes = [BYTE_LEVEL_ALPHABET.get(character) for character in token]
            return token.encode() if None in codes else bytes(code for code in codes if code is not None)
        if self._byte_tokens and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match.group(1), 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _is_marker(name: str) -> bool:
    return name.startswith(("<|", "<｜"))


def steps_of(tokenizer: tokenizers.Tokenizer) -> dict[str, list[dict[str, Any]]]:
    """Describe the steps of `normalizer`, `pre_tokenizer` and `decoder`, as `tokenizer.json` writes them."""
    # Without the vocabulary, whose text would take a second for a large one.
    shell = tokenizers.Tokenizer(models.BPE())
    for part in _INNER_NAMES:
        setattr(shell, part, getattr(tokenizer, part))
    described: dict[str, Any] = json.loads(shell.to_str())
    return {part: _flattened(described[part], inner) for part, inner in _INNER_NAMES.items()}


def _flattened(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [each for part in step[inner] for each in _flattened(part, inner)]


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        raise SettingsError("model: its tokenizer has no decoder, so tokens cannot be turned into text")
    steps = steps_of(tokenizer)["decoder"]
    for step in steps:
        if not _is_understood(step):
            raise SettingsError(
                f"model: its tokenizer's decoder {json.dumps(step)[:200]} is not supported; supported are "
                "ByteLevel, Metaspace and Replace with ByteFallback, Fuse and Strip"
            )
    return steps


def _is_understood(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] == 1 and step["stop"] == 0)
    return step["type"] in ("ByteLevel", "Metaspace", "ByteFallback", "Fuse")


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    return step["pattern"]["String"], step["content"]
