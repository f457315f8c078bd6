"""Loads a transformers model for the adapter, and refuses what the adapter would compute wrongly."""

import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.errors import ModelFileError
from kernels.kv_pool import KVPool
from kernels.models.adapter import ATTENTION_NAME, AdapterModel, run
from kernels.weights.hugging_face import read_eos_token_ids

_UNLIMITED_POSITIONS = 1 << 20
_CHANGES_ATTENTION = {
    "softcap": "soft-capping of attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases added to attention scores",
    "head_mask": "head masks",
    "attention_mask": "attention masks of its own",
}
"""What a model may pass to its attention that ours has no place for, and its name in words."""

_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Relative error of the logits; neighbours, positions or windows ignored give errors of the order of one."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A model that has passed every check, before there is a pool of its shape."""

    config: ModelConfig
    model: PreTrainedModel

    def bind(self, kv_pool: KVPool) -> AdapterModel:
        return AdapterModel(self.config, self.model, kv_pool)


def load_adapter(folder: Path, dtype: torch.dtype, device: torch.device) -> LoadedAdapter:
    """Reads local files only and runs no code of the checkpoint's.

    Raises ModelFileError for a model whose layers are not all causal softmax attention, or whose logits are not
    those of its own attention: a small mixed batch is computed both ways.
    """
    model = _load(folder, dtype)
    torch.nn.Module.to(model, device)  # transformers' own is typed for a decorator
    expected = _own_logits(model)
    model.set_attn_implementation(ATTENTION_NAME)
    probe = _Probe(folder)
    if model.config._attn_implementation == ATTENTION_NAME:
        tokens = torch.tensor(_PROMPTS[0], device=device)
        run(model, probe, tokens, torch.arange(len(tokens), device=device), tokens[:1] * 0)
    loaded = LoadedAdapter(_config(folder, model, probe, vocab_size=expected.shape[-1]), model)
    _check_logits(folder, loaded, expected)
    return loaded


def _load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    # Standard error is for log lines.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if type(config) not in AutoModelForCausalLM._model_mapping or config.is_encoder_decoder:
            raise ModelFileError(
                f"{folder}: model_type {config.model_type!r} is no decoder-only causal language model of transformers"
            )
        if getattr(config, "quantization_config", None):
            raise ModelFileError(
                f"{folder}: quantization_config is not supported; give an unquantized checkpoint or a GGUF file"
            )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # advice on training and generating, which the checks here replace
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelFileError(f"{folder}: transformers cannot load the model: {error}") from error
    model, report = loaded
    lacking = sorted(report["missing_keys"]) + sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if lacking:
        raise ModelFileError(
            f"{folder}: {len(lacking)} tensors of the model are missing or misshapen: {', '.join(lacking[:5])}"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelFileError(
            f"{folder}: {type(model).__name__} takes no position_ids, so rows cannot share a batch"
        )
    ready: PreTrainedModel = model.eval()
    return ready


class _Probe:
    """An attention that computes nothing and notes what each layer asks of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shapes: list[tuple[int, int]] = []
        """(num_kv_heads, head_dim) by layer"""
        self.windows: list[int | None] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        found = [name for name in _CHANGES_ATTENTION if options.get(name) is not None]
        if getattr(options["module"], "sinks", None) is not None:
            found.append("s_aux")
        if found:
            raise ModelFileError(f"{self._folder}: not supported: {_CHANGES_ATTENTION[found[0]]}")
        if options.get("is_causal") is False or getattr(options["module"], "is_causal", True) is False:
            raise ModelFileError(f"{self._folder}: attention that is not causal is not supported")
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise ModelFileError(
                f"{self._folder}: heads of {query.shape[-1]} (query), {key.shape[-1]} (key) and "
                f"{value.shape[-1]} (value) are not supported; they must be equal"
            )
        self.shapes.append((key.shape[1], key.shape[2]))
        self.windows.append(options.get("sliding_window"))
        return torch.zeros_like(query)


def _config(folder: Path, model: PreTrainedModel, probe: _Probe, *, vocab_size: int) -> ModelConfig:
    text = model.config.get_text_config()
    num_layers: int = text.num_hidden_layers
    if len(probe.shapes) != num_layers:
        raise ModelFileError(
            f"{folder}: {len(probe.shapes)} of the {num_layers} layers use transformers' attention interface; all "
            "must (state-space, linear and hand-written attention layers are not supported)"
        )
    if len(set(probe.shapes)) > 1:
        raise ModelFileError(
            f"{folder}: layers with different key-value heads are not supported: {sorted(set(probe.shapes))}"
        )
    _check_windows(folder, text, probe.windows)
    num_kv_heads, head_dim = probe.shapes[0]
    return ModelConfig(
        model_type=model.config.model_type,
        num_layers=num_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 0,
        num_heads=text.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=_max_positions(text),
        rms_norm_eps=0.0,  # like the next, the model's own affair
        rope_theta=0.0,
        eos_token_ids=read_eos_token_ids(folder),
        bos_token_id=text.bos_token_id,
    )


def _max_positions(text: Any) -> int:
    """Where the rotation depends on the longest row of a batch, only as far as it does not."""
    limit: int = getattr(text, "max_position_embeddings", None) or _UNLIMITED_POSITIONS
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings")
            limit = min(limit, original or getattr(text, "original_max_position_embeddings", None) or limit)
    return limit


def _check_windows(folder: Path, text: Any, windows: list[int | None]) -> None:
    """A window that a model only puts into its mask would be lost; the check of logits is too short to see it."""
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        declared = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if declared else "full_attention"] * len(windows)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind not in ("sliding_attention", "full_attention") or (
            kind == "sliding_attention" and window is None
        ):
            raise ModelFileError(
                f"{folder}: layer {layer} has {kind} that it does not pass to its attention function; not supported"
            )


_Row = tuple[int, tuple[int, ...], int]
"""Block, tokens, and how many tokens come before them."""

_PROMPTS = ((1, 5, 2, 7, 3, 6, 2, 9, 4, 8, 5), (4, 3, 3, 8, 1, 6))
"""Small ids, which every vocabulary has."""


@torch.inference_mode()
def _own_logits(model: PreTrainedModel) -> torch.Tensor:
    """[len(_PROMPTS), vocab_size]: after each prompt, alone, by the model's own attention."""
    prompts = [torch.tensor([prompt], device=model.device) for prompt in _PROMPTS]
    return torch.cat([model(input_ids=prompt, use_cache=False).logits[:, -1].float() for prompt in prompts])


def _check_logits(folder: Path, loaded: LoadedAdapter, expected: torch.Tensor) -> None:
    """The first prompt in a chunk of seven beside the second prompt, a chunk of three and a token by itself."""
    model = loaded.model
    try:
        pool = KVPool(loaded.config, 2, 16, model.dtype, model.device)
    except ValueError as error:
        raise ModelFileError(f"{folder}: its keys and values do not fit the pool: {error}") from error
    adapted = loaded.bind(pool)
    first, second = _PROMPTS
    steps: list[list[_Row]] = [
        [(0, first[:7], 0), (1, second, 0)],
        [(0, first[7:10], 7)],
        [(0, first[10:], 10)],
    ]
    logits = [adapted.forward(_batch(rows, model.device)) for rows in steps]
    found = torch.stack([logits[2][0], logits[0][1]])
    off_by = float((found - expected).norm() / expected.norm())
    limit = _TOLERANCES[model.dtype]
    if not off_by <= limit:
        raise ModelFileError(
            f"{folder}: {type(model).__name__} mixes tokens otherwise than by causal softmax attention: in a batch "
            f"its logits are off by {off_by:.2g} of their size (limit {limit:g})"
        )


def _batch(rows: list[_Row], device: torch.device) -> ForwardBatch:
    """Each row in one block of 16; logits after each row."""
    starts = torch.tensor([0, *(len(tokens) for _, tokens, _ in rows)]).cumsum(0)
    positions = torch.cat([torch.arange(start, start + len(tokens)) for _, tokens, start in rows])
    blocks = torch.cat([torch.full((len(tokens),), block) for block, tokens, _ in rows])
    tensors = {
        "token_ids": torch.tensor([token for _, tokens, _ in rows for token in tokens]),
        "positions": positions,
        "slot_mapping": blocks * 16 + positions,
        "block_tables": torch.tensor([[block] for block, _, _ in rows], dtype=torch.int32),
        "query_start": starts.int(),
        "context_lens": torch.tensor([start + len(tokens) for _, tokens, start in rows], dtype=torch.int32),
        "sample_indices": starts[1:] - 1,
    }
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    return ForwardBatch(**on_device, num_decode_rows=int(len(rows[0][1]) == 1))
