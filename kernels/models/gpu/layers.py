"""A decoder's weights on the device, as the forward pass wants them: fused along outputs that share an input."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.config import Gemma3Shape, ModelConfig
from kernels.models.rope import inverse_frequencies
from kernels.ops.store_kv.gpu import HeadNorm, Rotary


@dataclass(frozen=True, slots=True)
class Layer:
    """Norms are factors; those of Gemma 3 stay in float32 whatever the model's type."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: HeadNorm | None
    out: torch.Tensor
    attended_norm: torch.Tensor | None
    """Gemma 3: of what attention gives, before it is added"""
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    fed_norm: torch.Tensor | None
    """Gemma 3: of what the MLP gives, before it is added"""
    rotary: Rotary
    window: int | None

    @property
    def num_parameters(self) -> int:
        """Elements of its matrices."""
        return sum(matrix.numel() for matrix in (self.qkv, self.out, self.gate_up, self.down))


class LayerLoader:
    """Reads weights under their Hugging Face names and moves them to the device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        num_positions: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._rotary = self._tables(
            inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling), num_positions
        )
        self._local_rotary = self._rotary
        if config.gemma3 is not None:
            local = inverse_frequencies(config.head_dim, config.gemma3.local_rope_theta, None)
            self._local_rotary = self._tables(local, num_positions)

    def matrix(self, *names: str) -> torch.Tensor:
        """The named tensors, one under the other."""
        loaded = [self._weights[name].to(device=self._device, dtype=self._dtype) for name in names]
        return loaded[0] if len(loaded) == 1 else torch.cat(loaded)

    def norm(self, name: str) -> torch.Tensor:
        dtype = self._dtype if self._config.gemma3 is None else torch.float32
        return self._weights[name].to(device=self._device, dtype=dtype)

    def layer(self, layer_idx: int) -> Layer:
        config = self._config
        prefix = f"model.layers.{layer_idx}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        is_sandwich = config.gemma3 is not None
        mlp_norm = "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm"
        window = _window(config, config.gemma3, layer_idx)
        return Layer(
            input_norm=self.norm(prefix + "input_layernorm.weight"),
            qkv=self.matrix(*(f"{attention}{name}_proj.weight" for name in "qkv")),
            qkv_bias=self.matrix(*(f"{attention}{name}_proj.bias" for name in "qkv"))
            if config.qkv_bias
            else None,
            head_norm=self._head_norm(attention) if config.qk_norm or is_sandwich else None,
            out=self.matrix(attention + "o_proj.weight"),
            attended_norm=self.norm(prefix + "post_attention_layernorm.weight") if is_sandwich else None,
            mlp_norm=self.norm(f"{prefix}{mlp_norm}.weight"),
            gate_up=self.matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down=self.matrix(mlp + "down_proj.weight"),
            fed_norm=self.norm(prefix + "post_feedforward_layernorm.weight") if is_sandwich else None,
            rotary=self._rotary if window is None or not is_sandwich else self._local_rotary,
            window=window,
        )

    def _head_norm(self, attention: str) -> HeadNorm:
        query, key = (self.norm(f"{attention}{name}_norm.weight") for name in "qk")
        return HeadNorm(query, key, self._config.rms_norm_eps)

    def _tables(self, frequencies: torch.Tensor, num_positions: int) -> Rotary:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        return Rotary(angles.cos().to(self._device), angles.sin().to(self._device))


def _window(config: ModelConfig, gemma3: Gemma3Shape | None, layer_idx: int) -> int | None:
    return config.sliding_window if gemma3 is None else gemma3.layer_windows[layer_idx]
