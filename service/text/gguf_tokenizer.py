"""Builds tokenizers straight from GGUF metadata, where transformers takes seconds to a minute."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from service.errors import SettingsError

_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPACE: Final = "▁"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# Keyed by `tokenizer.ggml.pre`, llama.cpp's name for a way of splitting text.
_PRE_TOKENIZERS: Final[dict[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "llama-bpe": lambda: _split_by(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_by(_QWEN2_SPLIT),
    "deepseek-r1-qwen": lambda: _split_by(_QWEN2_SPLIT),
}
_NORMALIZED_NFC: Final = frozenset({"qwen2", "deepseek-r1-qwen"})


def can_build(metadata: dict[str, Any]) -> bool:
    """Tell whether `build_tokenizer` reproduces this file's way of splitting text exactly."""
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        return metadata.get("tokenizer.ggml.pre") in _PRE_TOKENIZERS
    # Where a space goes in front of the text, its place beside special tokens depends on the model.
    return _is_sentencepiece(metadata) and metadata.get("tokenizer.ggml.add_space_prefix") is False


def _is_sentencepiece(metadata: dict[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.model") == "llama"


def build_tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """Build the tokenizer that the metadata describes; `can_build` must hold.

    Raises SettingsError when a key is missing.
    """
    try:
        names: list[str] = metadata["tokenizer.ggml.tokens"]
        if _is_sentencepiece(metadata):
            scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
            unknown = special_names(metadata).get("unk_token")
            tokenizer = _sentencepiece(names, scores, types, unknown)
        else:
            pairs = (pair.partition(" ") for pair in metadata["tokenizer.ggml.merges"])
            merges = [(left, right) for left, _, right in pairs]
            tokenizer = _byte_level(names, merges, metadata["tokenizer.ggml.pre"])
    except KeyError as missing:
        raise SettingsError(f"model: {path.name} lacks the metadata {missing}") from None
    added = [
        AddedToken(name, normalized=False, special=kind == _CONTROL)
        for name, kind in zip(names, metadata.get("tokenizer.ggml.token_type", []), strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    # In the order of ids: each token says itself whether it is special.
    tokenizer.add_tokens(added)
    _add_opening_token(tokenizer, metadata, names)
    return tokenizer


def _byte_level(names: list[str], merges: list[tuple[str, str]], pre: str) -> Tokenizer:
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre in _NORMALIZED_NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    names: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: str | None
) -> Tokenizer:
    """Build a SentencePiece vocabulary with byte fallback, as Gemma has it, without its special tokens.

    SentencePiece joins, of all neighbours that make a piece, those whose piece scores best. That is BPE with
    one merge for each way to cut a piece in two, the best piece's first. No space is put before the text.
    """
    vocab = {name: token_id for token_id, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    pieces = [token_id for token_id, kind in enumerate(types) if kind == _NORMAL and len(names[token_id]) > 1]
    for token_id in sorted(pieces, key=lambda i: -scores[i]):
        name = names[token_id]
        cuts = ((name[:at], name[at:]) for at in range(len(name) - 1, 0, -1))
        merges.extend((left, right) for left, right in cuts if left in vocab and right in vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _add_opening_token(tokenizer: Tokenizer, metadata: dict[str, Any], names: list[str]) -> None:
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    by_default = _is_sentencepiece(metadata) or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", by_default) and bos_id is not None:
        bos = names[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_id)]
        )


def special_names(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens under the names that chat templates use, such as `bos_token`."""
    names: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: names[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(names)}


def end_token_ids(metadata: dict[str, Any]) -> frozenset[int]:
    """Return the ids that the file marks as the end of a generation or a turn."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return frozenset(i for i in ids if isinstance(i, int))
