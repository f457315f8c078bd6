"""A checkpoint's tensors by their role in a decoder; all decoders read their weights through this."""

from collections.abc import Mapping

import torch

from kernels.config import ModelConfig


class DecoderWeights:
    """Reads, moves and converts each tensor when it is asked for.

    A decoder asks for each once, so that at most one tensor exists twice at any time.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weights: by Hugging Face name. device, dtype: of the result; None keeps the tensor's own."""
        self.config = config
        self._weights, self._device, self._dtype = weights, device, dtype

    def matrix(self, *names: str) -> torch.Tensor:
        """The named tensors, concatenated along their outputs."""
        loaded = [self._weights[name].to(self._device, self._dtype) for name in names]
        return loaded[0] if len(loaded) == 1 else torch.cat(loaded)

    def norm(self, name: str) -> torch.Tensor:
        dtype = torch.float32 if self.config.has_float32_norms else self._dtype
        return self._weights[name].to(self._device, dtype)

    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]"""
        return self.matrix("model.embed_tokens.weight")

    def final_norm(self) -> torch.Tensor:
        """[hidden_size]"""
        return self.norm("model.norm.weight")

    def head(self, embedding: torch.Tensor) -> torch.Tensor:
        """[vocab_size, hidden_size]; the embedding itself if both are tied."""
        return embedding if self.config.tie_word_embeddings else self.matrix("lm_head.weight")

    def layer(self, layer_idx: int) -> "LayerWeights":
        return LayerWeights(self, f"model.layers.{layer_idx}.")


def rounded_embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Rounded to the model's type as in training: 640 ** 0.5 is 25.25 in bfloat16."""
    return float(torch.tensor(config.embedding_scale, dtype=dtype))


class LayerWeights:
    """One layer's tensors, [num_outputs, num_inputs] and [num_outputs]."""

    def __init__(self, source: DecoderWeights, prefix: str) -> None:
        self._source, self._config, self._prefix = source, source.config, prefix

    def norms(self) -> dict[str, torch.Tensor]:
        """By role. Every model has input_norm and mlp_norm, some also post_attention_norm and post_mlp_norm, or
        query_norm and key_norm."""
        names = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if self._config.has_post_norms:
            names |= {
                "post_attention_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "post_mlp_norm": "post_feedforward_layernorm",
            }
        if self._config.qk_norm:
            names |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
        return {role: self._source.norm(f"{self._prefix}{name}.weight") for role, name in names.items()}

    def qkv(self) -> torch.Tensor:
        """The projections to query, key and value, concatenated along their outputs."""
        return self._source.matrix(*(f"{self._prefix}self_attn.{name}_proj.weight" for name in "qkv"))

    def qkv_bias(self) -> torch.Tensor | None:
        if not self._config.qkv_bias:
            return None
        return self._source.matrix(*(f"{self._prefix}self_attn.{name}_proj.bias" for name in "qkv"))

    def out(self) -> torch.Tensor:
        return self._matrix("self_attn.o_proj")

    def gate(self) -> torch.Tensor:
        return self._matrix("mlp.gate_proj")

    def up(self) -> torch.Tensor:
        return self._matrix("mlp.up_proj")

    def down(self) -> torch.Tensor:
        return self._matrix("mlp.down_proj")

    def gate_up(self) -> torch.Tensor:
        """Gate and up, concatenated along their outputs."""
        return torch.cat((self.gate(), self.up()))

    def _matrix(self, name: str) -> torch.Tensor:
        return self._source.matrix(f"{self._prefix}{name}.weight")
