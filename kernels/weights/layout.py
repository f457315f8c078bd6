"""Which tensors a model of a given shape has; a checkpoint that differs is refused before it is read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from kernels.errors import ModelFileError
from kernels.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.attn.bias")
"""Buffers that older checkpoints carry and that follow from the config."""


class TensorReader(Protocol):
    """Tensors of one checkpoint under Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor, for messages."""
        ...

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor of shape `shapes[name]`, converted to `dtype` (norms of Gemma 3 to float32)."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.has_post_norms:
        yield "pre_feedforward_layernorm.weight", (hidden,)
        yield "post_feedforward_layernorm.weight", (hidden,)
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield f"self_attn.{name}.weight", (size, hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}.bias", (size,)
    yield "self_attn.o_proj.weight", (hidden, q_size)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "mlp.gate_proj.weight", (config.intermediate_size, hidden)
    yield "mlp.up_proj.weight", (config.intermediate_size, hidden)
    yield "mlp.down_proj.weight", (hidden, config.intermediate_size)


def check_layout(path: Path, config: ModelConfig, reader: TensorReader) -> None:
    """Raises ModelFileError for a missing tensor, a wrong shape, or a tensor that the model would ignore.

    `path` is the checkpoint's; messages on existing tensors name the tensor's own file.
    """
    expected, found = expected_shapes(config), reader.shapes
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelFileError(f"{path}: {len(missing)} tensors of the model are missing: {_some(missing)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelFileError(
                f"{reader.file_of(name)}: tensor {name} has shape {list(found[name])}; "
                f"the config asks for {list(shape)}"
            )
    tied_head = LM_HEAD if config.tie_word_embeddings else None
    unknown = [
        name
        for name in found
        if name not in expected and name != tied_head and not name.endswith(_IGNORED_SUFFIXES)
    ]
    if unknown:
        raise ModelFileError(
            f"{reader.file_of(unknown[0])}: {len(unknown)} tensors have no place in a {config.model_type} model: "
            f"{_some(unknown)}"
        )


def has_head_of_its_own(config: ModelConfig, reader: TensorReader) -> bool:
    """Whether a checkpoint with tied embeddings holds a different head, which is then used.

    transformers does so since version 5. Both tensors are read once, and only if both exist. Raises ModelFileError if
    their shapes differ.
    """
    if not config.tie_word_embeddings or not {LM_HEAD, EMBEDDING} <= reader.shapes.keys():
        return False
    if reader.shapes[LM_HEAD] != reader.shapes[EMBEDDING]:
        raise ModelFileError(
            f"{reader.file_of(LM_HEAD)}: tensor {LM_HEAD} has shape {list(reader.shapes[LM_HEAD])}; "
            f"the embedding that it is tied to has {list(reader.shapes[EMBEDDING])}"
        )
    return not torch.equal(reader.load(LM_HEAD, torch.float32), reader.load(EMBEDDING, torch.float32))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
