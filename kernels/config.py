"""The shape of a decoder-only model, read from a Hugging Face config.json or GGUF metadata."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`) or linear scaling."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Gemma3Shape:
    """What Gemma 3 has beyond a Llama-like decoder; its norms and activation follow from the family."""

    layer_windows: tuple[int | None, ...]
    """Each layer's sliding window; None looks at the whole context."""
    local_rope_theta: float
    """Of the layers with a window; rope_theta and rope_scaling are those of the others."""
    attention_scale: float
    """Factor of q·kᵀ."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    """llama, mistral, qwen2, qwen3, gemma3, …"""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    """Qwen2: q, k and v projections carry a bias."""
    qk_norm: bool = False
    """Qwen3: RMS norm over each head of q and k, before rotary."""
    sliding_window: int | None = None
    """Of every layer; Gemma 3 has `gemma3.layer_windows` instead."""
    gemma3: Gemma3Shape | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None
