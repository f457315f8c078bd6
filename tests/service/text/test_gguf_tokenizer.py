"""Tokenizers from GGUF files: equal to those they were written from, and clear about files that are broken."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer as HfTokenizer

from service.errors import SettingsError
from service.text import ModelTokenizer, load_tokenizer
from tests.service.text import tiny


def gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    entries = b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + entries)
    return path


def metadata_of(tokenizer: HfTokenizer, pre: str) -> dict[str, Any]:
    described = json.loads(tokenizer.to_str())
    added = {token["id"]: token for token in described["added_tokens"]}
    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    kinds = {True: 3, False: 4}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [
            kinds[added[i]["special"]] if i in added else 1 for i in range(len(names))
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tiny.CHATML,
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tiny.ROUND_TRIPS)
def test_gguf_tokenizer_equals_the_one_it_was_written_from(tmp_path: Path, text: str) -> None:
    original = TINY
    loaded = load_once(tmp_path)
    assert loaded.encode_prompt(text) == original.encode(text).ids


TINY = tiny.byte_level()
LOADED: dict[str, ModelTokenizer] = {}


def load_once(folder: Path) -> ModelTokenizer:
    if "gpt-2" not in LOADED:
        tokenizer = load_tokenizer(write_gguf(folder / "m.gguf", metadata_of(TINY, "gpt-2")))
        assert isinstance(tokenizer, ModelTokenizer)
        LOADED["gpt-2"] = tokenizer
    return LOADED["gpt-2"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " 2024", " b"]),
        ("smollm", ["a", " ", "2", "0", "2", "4", " b"]),
        ("llama-bpe", ["a", " ", "202", "4", " b"]),
        ("qwen2", ["a", " ", "2", "0", "2", "4", " b"]),
    ],
)
def test_gguf_splits_digits_as_its_family_does(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata_of(TINY, pre)))
    assert isinstance(tokenizer, ModelTokenizer)
    split = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str("a 2024 b")
    assert [piece.replace("Ġ", " ") for piece, _ in split] == pieces


def test_gguf_names_its_ends_template_and_opening_token(tmp_path: Path) -> None:
    metadata = metadata_of(TINY, "smollm") | {"tokenizer.ggml.add_bos_token": True}
    write_gguf(tmp_path / "m.gguf", metadata)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {1, 2}
    assert tokenizer.encode_prompt("x")[0] == 0
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}])[:1] == [0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata keys; the limit is 65536"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40), "is truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "is truncated"),
        (b"", "is empty"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<I", 99),
            "unknown metadata type 99",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<IIQ", 9, 8, 1 << 25),
            "array entries; the limit is 16777216",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + gguf_string("k")
            + struct.pack("<I", 9)
            + struct.pack("<IQ", 9, 1) * 5,
            "unknown metadata type 9",
        ),
    ],
)
def test_broken_gguf_is_the_operators_error(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match=message):
        load_tokenizer(path)
