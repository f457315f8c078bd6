"""The shape of a decoder-only model, read from a Hugging Face config.json or GGUF metadata."""

from dataclasses import dataclass, field
from typing import Final, Literal

MAX_LAYERS: Final = 1 << 10
"""Eight times what the deepest known models have (126). A file that says billions would fill the memory with shapes."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`) or linear scaling."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What tells the families apart is data here: decoders never ask for the model type."""

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
    """Qwen3, Gemma 3: RMS norm over each head of q and k, before rotary."""
    layer_windows: tuple[int | None, ...] = ()
    """Each layer's sliding window, a token itself included; None sees the whole context. Empty: no layer has one."""
    local_rope_theta: float | None = None
    """Gemma 3: rotary base of the layers with a window, never scaled. None: they rotate like the others."""
    attention_scale: float | None = None
    """Factor of q·kᵀ. None: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """Gemma 3: factor of the embeddings, rounded to the model's type as in training."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The function applied to the MLP's gate."""
    has_post_norms: bool = False
    """Gemma 3: the outputs of attention and MLP are normed before they are added."""
    has_float32_norms: bool = False
    """Gemma 3: norm weights are float32 whatever the model's type, and multiply before the result is rounded."""
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None

    def window(self, layer_idx: int) -> int | None:
        return self.layer_windows[layer_idx] if self.layer_windows else None

    @property
    def score_scale(self) -> float:
        """The factor of q·kᵀ, whether the config names it or not."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
