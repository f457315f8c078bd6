"""Writes GGUF files, sound and unsound, of the smallest model that has every tensor."""

import struct
from dataclasses import dataclass, replace
from random import Random
from typing import Any

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _U32, _U64, _F32 = 8, 9, 4, 10, 6
ODD_INTEGERS = (
    0,
    1,
    2,
    3,
    31,
    33,
    127,
    2**16,
    2**24 + 1,
    2**31,
    2**32 - 1,
    2**40,
    2**61,
    2**62,
    2**63,
    2**64 - 1,
)


@dataclass(frozen=True)
class Array:
    type_id: int
    values: tuple[Any, ...]
    length: int | None = None
    """What the file says, if not the truth."""


@dataclass(frozen=True)
class GgufTensor:
    name: str
    dims: tuple[int, ...]
    values: tuple[float, ...] = ()
    type_id: int = 0
    offset: int | None = None


@dataclass(frozen=True)
class GgufSpec:
    keys: tuple[tuple[str, int, Any], ...]
    tensors: tuple[GgufTensor, ...]
    version: int = 3
    magic: bytes = b"GGUF"
    num_tensors: int | None = None
    num_keys: int | None = None
    alignment: int = 32


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(type_id: int, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if type_id == _STRING:
        return _string(value)
    if isinstance(value, Array):
        head = struct.pack("<IQ", value.type_id, len(value.values) if value.length is None else value.length)
        return head + b"".join(_value(value.type_id, each) for each in value.values)
    kind = _FORMATS.get(type_id, "Q")
    if kind in "BbHhIiQq":
        size = struct.calcsize(kind)
        return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return struct.pack("<" + kind, value)


def write_gguf(spec: GgufSpec) -> bytes:
    counts = (
        len(spec.tensors) if spec.num_tensors is None else spec.num_tensors,
        len(spec.keys) if spec.num_keys is None else spec.num_keys,
    )
    head = spec.magic + struct.pack("<IQQ", spec.version & 0xFFFFFFFF, *counts)
    for key, type_id, value in spec.keys:
        head += _string(key) + struct.pack("<I", type_id) + _value(type_id, value)
    data = b""
    for tensor in spec.tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        head += _string(tensor.name) + dims + struct.pack("<IQ", tensor.type_id, offset)
        part = struct.pack(f"<{len(tensor.values)}f", *tensor.values)
        data += part + bytes(-len(part) % spec.alignment)
    return head + bytes(-len(head) % spec.alignment) + data


def write_metadata(metadata: dict[str, Any]) -> bytes:
    """Write what a reader returned, each value in the widest type of its kind."""
    return write_gguf(GgufSpec(tuple((key, *_typed(value)) for key, value in metadata.items()), ()))


def _typed(value: Any) -> tuple[int, Any]:
    if isinstance(value, bool):
        return 7, value
    if isinstance(value, int):
        return (_U64 if value >= 0 else 11), value
    if isinstance(value, float):
        return 12, value
    if isinstance(value, str):
        return _STRING, value
    entries = [_typed(each) for each in value]
    kinds = {type_id for type_id, _ in entries} or {_U32}
    if kinds == {_U64, 11}:
        kinds = {11}
    return _ARRAY, Array(min(kinds), tuple(each for _, each in entries))


def values_of(spec: GgufSpec) -> dict[str, Any]:
    """What a reader should return for the keys."""
    return {key: _plain(value) for key, _, value in spec.keys}


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value.values] if isinstance(value, Array) else value


_SHAPES: tuple[tuple[str, tuple[int, ...]], ...] = (
    *(("token_embd.weight", (2, 3)), ("output_norm.weight", (2,)), ("blk.0.attn_norm.weight", (2,))),
    *(("blk.0.ffn_norm.weight", (2,)), ("blk.0.attn_q.weight", (2, 2)), ("blk.0.attn_k.weight", (2, 2))),
    *(
        ("blk.0.attn_v.weight", (2, 2)),
        ("blk.0.attn_output.weight", (2, 2)),
        ("blk.0.ffn_gate.weight", (2, 2)),
    ),
    *(("blk.0.ffn_up.weight", (2, 2)), ("blk.0.ffn_down.weight", (2, 2))),
)


def good_gguf(rng: Random) -> GgufSpec:
    keys: list[tuple[str, int, Any]] = [
        ("general.architecture", _STRING, "llama"),
        *(
            (f"llama.{name}", _U32, 1)
            for name in ("block_count", "attention.head_count", "attention.head_count_kv")
        ),
        *(
            (f"llama.{name}", rng.choice((_U32, _U64)), 2)
            for name in ("embedding_length", "feed_forward_length")
        ),
        ("llama.context_length", _U32, 8),
        ("llama.attention.layer_norm_rms_epsilon", _F32, 0.5),
        ("tokenizer.ggml.tokens", _ARRAY, Array(_STRING, ("a", "é", "<s>"))),
        ("tokenizer.ggml.eos_token_id", _U32, 2),
    ]
    if rng.random() < 0.3:
        keys.append(("x.scores", _ARRAY, Array(_F32, (0.0, 1.5))))
        keys.append(("x.nested", _ARRAY, Array(_ARRAY, (Array(_U32, (1,)), Array(_STRING, ("b",))))))
    if rng.random() < 0.3:
        keys.append(("llama.attention.sliding_window", _U32, 4))
    shapes = [*_SHAPES, *([("output.weight", (2, 3))] if rng.random() < 0.3 else [])]
    tensors = [
        GgufTensor(name, dims, tuple(0.5 * i for i in range(dims[0] * (dims[1] if len(dims) > 1 else 1))))
        for name, dims in shapes
    ]
    return GgufSpec(tuple(keys), tuple(tensors), version=rng.choice((2, 3)))


def odd_gguf(rng: Random, spec: GgufSpec) -> GgufSpec:
    """One or two things that no writer does."""
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.random()
        if kind < 0.1:
            fields: tuple[dict[str, Any], ...] = (
                *({"version": rng.choice((0, 1, 4, 2**31))}, {"magic": b"FUGG"}, {"alignment": 1}),
                *({"num_tensors": rng.choice(ODD_INTEGERS)}, {"num_keys": rng.choice(ODD_INTEGERS)}),
            )
            spec = replace(spec, **rng.choice(fields))
        elif kind < 0.6:
            spec = replace(spec, keys=_odd_keys(rng, list(spec.keys)))
        else:
            spec = replace(spec, tensors=_odd_tensors(rng, list(spec.tensors)))
    return spec


def _odd_keys(rng: Random, keys: list[tuple[str, int, Any]]) -> tuple[tuple[str, int, Any], ...]:
    at = rng.randrange(len(keys))
    key, type_id, value = keys[at]
    kind = rng.random()
    if kind < 0.4:
        keys[at] = (key, _U64, rng.choice(ODD_INTEGERS))
    elif kind < 0.6:
        keys[at] = (key, *_odd_value(rng))
    elif kind < 0.7:
        keys.append((key, *_odd_value(rng)))
    elif kind < 0.8:
        name = rng.choice(
            (
                "general.alignment",
                "llama.rope.scaling.type",
                "llama.attention.key_length",
                "llama.expert_count",
            )
        )
        keys.append((name, *_odd_value(rng)))
    elif kind < 0.9:
        del keys[at]
    else:
        keys[at] = (rng.choice(("", "x" * 5000, "llama.", "general.architecture")), type_id, value)
    return tuple(keys)


def _odd_value(rng: Random) -> tuple[int, Any]:
    integer = rng.choice(ODD_INTEGERS)
    deep: Any = Array(_U32, (1,))
    for _ in range(rng.choice((2, 4, 5, 40))):
        deep = Array(_ARRAY, (deep,))
    return rng.choice(
        (
            *(
                (_U64, integer),
                (11, -1),
                (5, -(2**31)),
                (7, True),
                (7, b"\x02"),
                (_STRING, ""),
                (_STRING, "gemma3"),
            ),
            *(
                (12, float("nan")),
                (12, float("inf")),
                (12, -0.0),
                (12, 1e300),
                (_F32, 1e-40),
                (_STRING, "linear"),
            ),
            *(
                (_ARRAY, deep),
                (_ARRAY, Array(_U32, (1, 2), integer)),
                (_ARRAY, Array(_STRING, ("a",), integer)),
            ),
            *((_ARRAY, Array(99, ())), (13, b""), (2**32 - 1, b""), (_ARRAY, Array(_U32, ()))),
            *(
                (_ARRAY, Array(0, (7,) * 2000)),
                (_ARRAY, Array(_STRING, ("a",) * 2000)),
                (_ARRAY, Array(_ARRAY, (), 2000)),
            ),
            *((_STRING, struct.pack("<Q", integer) + b"abc"), (_STRING, struct.pack("<Q", 2) + b"\xff\xfe")),
        )
    )


def _odd_tensors(rng: Random, tensors: list[GgufTensor]) -> tuple[GgufTensor, ...]:
    at = rng.randrange(len(tensors))
    tensor = tensors[at]
    kind = rng.random()
    if kind < 0.35 and tensor.dims:
        dims = list(tensor.dims)
        dims[rng.randrange(len(dims))] = rng.choice(ODD_INTEGERS)
        tensors[at] = replace(tensor, dims=tuple(dims))
    elif kind < 0.5:
        tensors[at] = replace(tensor, dims=tuple(rng.choice(ODD_INTEGERS) for _ in range(rng.randrange(7))))
    elif kind < 0.6:
        tensors[at] = replace(tensor, type_id=rng.choice((1, 2, 8, 12, 30, 31, 99, 2**32 - 1)))
    elif kind < 0.7:
        tensors[at] = replace(tensor, offset=rng.choice(ODD_INTEGERS))
    elif kind < 0.8:
        names = (
            "rope_freqs.weight",
            "lm_head.weight",
            "model.norm.weight",
            "blk.1.attn_q.weight",
            "",
            "x" * 3000,
        )
        tensors.append(
            replace(tensor, name=rng.choice(names), dims=rng.choice(((1,), (2,), (0,), tensor.dims)))
        )
    elif kind < 0.9:
        tensors.append(tensor)
    else:
        del tensors[at]
    return tuple(tensors)
