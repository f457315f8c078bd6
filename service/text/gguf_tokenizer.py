"""Tokenizers built straight from GGUF metadata, without transformers' seconds to a minute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from service.errors import SettingsError
from service.text.gguf_sentencepiece import sentencepiece_tokenizer

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

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


# By `tokenizer.ggml.pre`, the name that the converter of llama.cpp gives to a way of splitting text.
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
    """Whether this file's way of splitting text is one that we know exactly."""
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        return metadata.get("tokenizer.ggml.pre") in _PRE_TOKENIZERS
    # With a space in front, where it goes beside special tokens depends on the model.
    return _is_sentencepiece(metadata) and metadata.get("tokenizer.ggml.add_space_prefix") is False


def _is_sentencepiece(metadata: dict[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.model") == "llama"


def build_tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that the metadata describes; `can_build` holds."""
    try:
        names: list[str] = metadata["tokenizer.ggml.tokens"]
        if _is_sentencepiece(metadata):
            scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
            unknown = special_names(metadata).get("unk_token")
            tokenizer = sentencepiece_tokenizer(names, scores, types, unknown)
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
    # One list in the order of ids; whether a token is special stands in each.
    tokenizer.add_tokens(added)
    _add_opening_token(tokenizer, metadata, names)
    return tokenizer


def _byte_level(names: list[str], merges: list[tuple[str, str]], pre: str) -> Tokenizer:
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre in _NORMALIZED_NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = ByteLevelDecoder()
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
    """`bos_token`, `eos_token` and so on, as chat templates call them."""
    names: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: names[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(names)}


def end_token_ids(metadata: dict[str, Any]) -> frozenset[int]:
    """The ids by which the file itself says that a generation or a turn ends."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return frozenset(i for i in ids if isinstance(i, int))
