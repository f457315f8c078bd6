"""Tensors of a GGUF file under Hugging Face names, dequantized row block by row block."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kernels.errors import ModelFileError
from kernels.model_config import ModelConfig
from kernels.weights.gguf_config import read_config
from kernels.weights.gguf_file import GgufFile, TensorInfo

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.")

_SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    )
)
_CHUNK_ELEMENTS = 1 << 20


def open_gguf(path: Path) -> tuple[ModelConfig, "GgufTensors"]:
    """Open a file. Raises ModelFileError if it is damaged or of a kind we cannot run, OSError if it cannot be read."""
    file = GgufFile(path)
    config = read_config(file, _rope_factors(file))
    return config, GgufTensors(file, config)


class GgufTensors:
    """Reads one tensor at a time; a dequantized copy never exceeds the tensor asked for and one row block."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        layer_names = _GEMMA3_LAYER_NAMES if config.has_post_norms else _LAYER_NAMES
        self._infos: dict[str, TensorInfo] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for info in file.tensors.values():
            file.check_extent(info, _num_bytes(file.path, info))
            if info.name != _ROPE_FACTORS:
                name = _hugging_face_name(info.name, layer_names)
                if name in self._infos:
                    other = self._infos[name].name
                    raise ModelFileError(f"{file.path}: tensors {other} and {info.name} are the same, {name}")
                self._infos[name] = info
                shapes[name] = tuple(reversed(info.dims))
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def file_of(self, name: str) -> Path:
        assert name in self._infos, name
        return self._file.path

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor of shape `shapes[name]`, dequantized and converted to `dtype`."""
        info = self._infos[name]
        tensor = _dequantize(self._file, info, dtype)
        permuted = _PERMUTED.match(info.name) if self._config.model_type == "llama" else None
        if permuted is None:
            return tensor
        return _unpermute(tensor, self._config.num_heads if permuted[1] == "q" else self._config.num_kv_heads)


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """The Hugging Face name; unknown names are unchanged, and the layout check refuses them."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in layer_names:
        return name
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _num_bytes(path: Path, info: TensorInfo) -> int:
    kind = _quantization(path, info)
    return math.prod(info.dims[1:]) * _row_bytes(
        path, info, kind
    )  # of any size: NumPy's product wraps around


def _quantization(path: Path, info: TensorInfo) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(info.type_id)
    except ValueError:
        kind = None
    if kind not in _SUPPORTED_TYPES:
        raise ModelFileError(
            f"{path}: tensor {info.name} has type {kind.name if kind else info.type_id}; "
            f"supported: {', '.join(known.name for known in _SUPPORTED_TYPES)}"
        )
    return kind


def _row_bytes(path: Path, info: TensorInfo, kind: GGMLQuantizationType) -> int:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if info.dims[0] % block_elements:
        raise ModelFileError(
            f"{path}: rows of tensor {info.name} have {info.dims[0]} elements; "
            f"{kind.name} needs a multiple of {block_elements}"
        )
    return int(info.dims[0] // block_elements * block_bytes)


def _dequantize(file: GgufFile, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    kind = _quantization(file.path, info)
    row_bytes, row_elements = _row_bytes(file.path, info, kind), info.dims[0]
    num_rows = math.prod(info.dims[1:])
    out = torch.empty((num_rows, row_elements), dtype=dtype)
    chunk_rows = max(1, _CHUNK_ELEMENTS // row_elements)
    for row in range(0, num_rows, chunk_rows):
        rows = min(chunk_rows, num_rows - row)
        raw = np.frombuffer(file.data(info, row * row_bytes, rows * row_bytes), dtype=np.uint8)
        values = dequantize(_as_stored(raw.reshape(rows, row_bytes), kind), kind)
        out[row : row + rows] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return out.reshape(tuple(reversed(info.dims)))


def _as_stored(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.generic]:
    """Floats as floats; quantized types as bytes, which the gguf package expects."""
    if kind is GGMLQuantizationType.F32:
        return raw.view(
            np.float32
        ).copy()  # a copy, because the map is read-only and torch needs writable memory
    return raw.view(np.float16) if kind is GGMLQuantizationType.F16 else raw


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the interleaving of each head's rotary pairs that llama.cpp's converter applies to q and k."""
    half = tensor.shape[0] // num_heads // 2
    rows = tensor.reshape(num_heads, half, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape).contiguous()


def _rope_factors(file: GgufFile) -> npt.NDArray[np.float32] | None:
    info = file.tensors.get(_ROPE_FACTORS)
    if info is None:
        return None
    file.check_extent(info, _num_bytes(file.path, info))
    return np.asarray(_dequantize(file, info, torch.float32).numpy())
