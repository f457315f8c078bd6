"""Model files: GGUF, safetensors with their index, and config.json."""

import math
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from random import Random
from typing import Any

import orjson
import torch

from kernels.errors import ModelFileError
from kernels.model_config import MAX_LAYERS, ModelConfig
from kernels.weights.checkpoint import Checkpoint, open_checkpoint
from kernels.weights.gguf_file import read_gguf_metadata
from kernels.weights.hugging_face import read_config
from kernels.weights.safetensors_folder import SafetensorsFolder
from kernels.weights.source import ModelFormat, ModelSource
from tests.fuzz.mutate import bad_json, mutated_bytes
from tests.fuzz.target import Outcome, Target, expect
from tests.fuzz.targets.gguf_bytes import GgufSpec, good_gguf, odd_gguf, values_of, write_gguf, write_metadata


@cache
def folder() -> Path:
    """A place in memory for this process's files."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="tailrace-fuzz-", dir=memory if memory.is_dir() else None))
    # Not atexit, which the processes of a pool leave out.
    Finalize(None, shutil.rmtree, args=(place,), kwargs={"ignore_errors": True}, exitpriority=1)
    return place


def put(name: str, data: bytes) -> Path:
    """Write a new file, because the old one may still be mapped."""
    path = folder() / name
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def refused(error: Exception, good: bool) -> Outcome:
    expect(not good, "refused a good file", str(error))
    expect(str(folder()) in str(error), "does not name the file", str(error))
    expect(len(str(error)) < 20_000, "the message repeats the file", str(error))
    return Outcome.REFUSED


@dataclass(frozen=True)
class GgufBytes:
    data: bytes
    good: GgufSpec | None


@dataclass(frozen=True)
class GgufFiles(Target):
    name = "gguf"
    share = 0.2
    read: Callable[[Path], dict[str, Any]] = read_gguf_metadata
    open: Callable[[ModelSource, torch.dtype], Checkpoint] = open_checkpoint

    def make(self, rng: Random) -> GgufBytes:
        spec = good_gguf(rng)
        kind = rng.random()
        if kind < 0.1:
            return GgufBytes(write_gguf(spec), spec)
        if kind < 0.7:
            spec = odd_gguf(rng, spec)
        data = write_gguf(spec)
        return GgufBytes(data if kind < 0.6 else mutated_bytes(rng, data), None)

    def check(self, case: GgufBytes) -> Outcome:
        path = put("model.gguf", case.data)
        try:
            metadata = self.read(path)
        except ModelFileError as error:
            return refused(error, case.good is not None)
        again = self.read(put("again.gguf", write_metadata(metadata)))
        expect(repr(again) == repr(metadata), "does not survive being written", metadata, again)
        if case.good is not None:
            expect(repr(metadata) == repr(values_of(case.good)), "other metadata than were written", metadata)
        try:
            checkpoint = self.open(ModelSource(path, ModelFormat.GGUF, "m"), torch.float32)
        except ModelFileError as error:
            return refused(error, case.good is not None)
        check_tensors(checkpoint)
        if case.good is not None:
            expect(len(checkpoint.weights) == len(case.good.tensors), "tensors", list(checkpoint.weights))
        return Outcome.ACCEPTED


def check_tensors(checkpoint: Checkpoint) -> None:
    """Every tensor that the layout check let pass can be read, and has the size that the config promises."""
    config = checkpoint.config
    for name in checkpoint.weights:
        tensor = checkpoint.weights[name]
        expect(tensor.dtype is torch.float32 and tensor.numel() > 0, "tensor", name, tensor.shape)
    embedding = checkpoint.weights["model.embed_tokens.weight"]
    expect(embedding.shape == (config.vocab_size, config.hidden_size), "embedding", embedding.shape, config)


@dataclass(frozen=True)
class Tensors:
    files: dict[str, bytes]
    good: dict[str, list[float]] | None


INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True)
class Safetensors(Target):
    name = "safetensors"
    share = 0.15
    open: Callable[[Path], SafetensorsFolder] = SafetensorsFolder

    def make(self, rng: Random) -> Tensors:
        values = {
            name: [rng.choice((0.0, 1.5, -2.0)) for _ in range(rng.randrange(1, 5))]
            for name in ("a", "b.c", "é")
        }
        good = rng.random() < 0.15
        if rng.random() < 0.5:
            return Tensors({"model.safetensors": shard_bytes(rng, values, good)}, values if good else None)
        first, second = {"a": values["a"]}, {name: values[name] for name in ("b.c", "é")}
        index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(first, SHARDS[0])}
        index["weight_map"] |= dict.fromkeys(second, SHARDS[1])
        bad_index = not good and rng.random() < 0.6
        files = {
            SHARDS[0]: shard_bytes(rng, first, good or bad_index),
            SHARDS[1]: shard_bytes(rng, second, good or bad_index),
            INDEX: self._index_bytes(rng, index) if bad_index else orjson.dumps(index),
        }
        return Tensors(files, values if good else None)

    def _index_bytes(self, rng: Random, index: dict[str, Any]) -> bytes:
        names = (
            "../x",
            "/etc/passwd",
            "x" * 300,
            "a\x00b",
            "",
            ".",
            SHARDS[1],
            "model.safetensors",
            "sub/" + SHARDS[0],
        )
        if rng.random() < 0.4:
            index["weight_map"][rng.choice(("a", "é", "new"))] = rng.choice(names)
            return orjson.dumps(index)
        return bad_json(rng, index)

    def check(self, case: Tensors) -> Outcome:
        for old in folder().glob("model*"):
            old.unlink()
        for name, data in case.files.items():
            put(name, data)
        try:
            tensors = self.open(folder())
        except ModelFileError as error:
            return refused(error, case.good is not None)
        for name, shape in tensors.shapes.items():
            tensor = tensors.load(name, torch.float32)
            expect(tuple(tensor.shape) == shape and tensor.numel() == math.prod(shape), "shape", name, shape)
            if case.good is not None:
                expect(tensor.flatten().tolist() == case.good[name], "values", name)
        expect(case.good is None or tensors.shapes.keys() == case.good.keys(), "names", tensors.shapes)
        return Outcome.ACCEPTED


def shard_bytes(rng: Random, values: dict[str, list[float]], good: bool) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, numbers in values.items():
        part = struct.pack(f"<{len(numbers)}f", *numbers)
        header[name] = {
            "dtype": "F32",
            "shape": [len(numbers)],
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    written = orjson.dumps(header)
    if good:
        return struct.pack("<Q", len(written)) + written + data
    kind = rng.random()
    if kind < 0.6:
        written = bad_json(rng, header)
    length = (
        len(written)
        if kind < 0.8
        else rng.choice((0, 1, len(written) + 1, len(written) - 1, 2**63, 2**64 - 1))
    )
    whole = struct.pack("<Q", length) + written + data
    return mutated_bytes(rng, whole) if kind > 0.9 else whole


ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "rope_scaling": ROPE,
        "rope_theta": 5e5,
        "hidden_act": "silu",
        "eos_token_id": [1, 2],
    },
    {"model_type": "mistral", "sliding_window": 32, "bos_token_id": 1, "eos_token_id": 2},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
    {"model_type": "qwen3", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention"] * 2,
    },
    {
        "model_type": "gemma3",
        "text_config": {"sliding_window_pattern": 2, **SIZES},
        "tie_word_embeddings": True,
    },
)


@dataclass(frozen=True)
class Config:
    data: bytes
    good: bool


@dataclass(frozen=True)
class Configs(Target):
    name = "config"
    share = 0.5
    read: Callable[[Path], ModelConfig] = read_config

    def make(self, rng: Random) -> Config:
        document = SIZES | rng.choice(CONFIGS)
        if rng.random() < 0.1:
            document["quantization_config"] = rng.choice((None, {}))
        good = rng.random() < 0.1
        return Config(orjson.dumps(document) if good else bad_json(rng, document), good)

    def check(self, case: Config) -> Outcome:
        put("config.json", case.data)
        try:
            config = self.read(folder())
        except ModelFileError as error:
            return refused(error, case.good)
        expect(config.num_layers <= MAX_LAYERS, "layers", config.num_layers)
        expect(len(config.layer_windows) in (0, config.num_layers), "windows", config)
        expect(config.num_heads % config.num_kv_heads == 0 and config.head_dim % 2 == 0, "heads", config)
        expect(config.bos_token_id is None or type(config.bos_token_id) is int, "bos_token_id", config)
        expect(all(type(token_id) is int for token_id in config.eos_token_ids), "eos_token_ids", config)
        expect(0 < config.rms_norm_eps < math.inf and 0 < config.rope_theta < math.inf, "numbers", config)
        expect(all(w is None or w > 0 for w in config.layer_windows), "windows", config)
        return Outcome.ACCEPTED
