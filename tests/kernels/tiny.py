"""Tiny random checkpoints of each family, made by transformers itself."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.weights.checkpoint import Checkpoint, open_checkpoint
from kernels.weights.source import resolve_model

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(**{name: value for name, value in SIZES.items() if name != "head_dim"})
    )


def _gemma3(**changes: Any) -> PreTrainedModel:
    """Windows in four of six layers, and an attention scale that does not follow from the head size."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 6, "hidden_size": 72},
            sliding_window=20,
            sliding_window_pattern=3,
            query_pre_attn_scalar=40,
            **changes,
        )
    )


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
}

NARROW = {**SIZES, "hidden_size": 64}
"""Heads that together are wider than the hidden size."""

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama3_rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "llama_linear_rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0})
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**NARROW, sliding_window=24)),
    "qwen2": _qwen2,
    "gemma3": _gemma3,
    "gemma3_untied": lambda: _gemma3(tie_word_embeddings=False),
    "gemma3_rope": lambda: _gemma3(rope_parameters=GEMMA3_ROPE),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**NARROW)),
}


def make_model(family: str) -> PreTrainedModel:
    """Random weights, biases and norms from a fixed seed, so that every parameter matters."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def load(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return open_checkpoint(resolve_model(str(path)), dtype)


@torch.inference_mode()
def reference_tokens(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy decoding by transformers, alone and without stopping at an end of sequence."""
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
