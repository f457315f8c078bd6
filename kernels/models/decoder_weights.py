"""A checkpoint's tensors by their role in a decoder; all decoders read their weights through this."""

from collections.abc import Mapping

import torch

from kernels.model_config import ModelConfig


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
        """weights: by Hugging Face name, matrices [num_outputs, num_inputs], norms and biases [size], any float type.

        device, dtype: of the results; None keeps the tensor's own.
        """
        self.config = config
        self._weights, self._device, self._dtype = weights, device, dtype

    def matrix(self, *names: str) -> torch.Tensor:
        """Load tensors [num_outputs, ...] of one dtype and concatenate them along their outputs."""
        loaded = [self._weights[name].to(self._device, self._dtype) for name in names]
        return loaded[0] if len(loaded) == 1 else torch.cat(loaded)

    def norm(self, name: str) -> torch.Tensor:
        """Load a norm weight [size]; float32 where the model keeps its norms in float32."""
        dtype = torch.float32 if self.config.has_float32_norms else self._dtype
        return self._weights[name].to(self._device, dtype)

    def embedding(self) -> torch.Tensor:
        """Load the embedding [vocab_size, hidden_size], in the dtype of all matrices."""
        return self.matrix("model.embed_tokens.weight")

    def final_norm(self) -> torch.Tensor:
        """Load the weight of the last norm, [hidden_size], in the dtype of all norms."""
        return self.norm("model.norm.weight")

    def head(self, embedding: torch.Tensor) -> torch.Tensor:
        """Load the head [vocab_size, hidden_size], in the embedding's dtype; `embedding` itself if both are tied."""
        return embedding if self.config.tie_word_embeddings else self.matrix("lm_head.weight")

    def layer(self, layer_idx: int) -> "LayerWeights":
        return LayerWeights(self, f"model.layers.{layer_idx}.")


def rounded_embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the embedding scale rounded to the model's type, as in training: 640 ** 0.5 is 25.25 in bfloat16."""
    return float(torch.tensor(config.embedding_scale, dtype=dtype))


class LayerWeights:
    """One layer's tensors: matrices [num_outputs, num_inputs], norms and biases [size], in the source's dtype."""

    def __init__(self, source: DecoderWeights, prefix: str) -> None:
        self._source, self._config, self._prefix = source, source.config, prefix

    def norms(self) -> dict[str, torch.Tensor]:
        """Load the norm weights by role: [hidden_size], query_norm and key_norm [head_dim].

        Every model has input_norm and mlp_norm; some also have post_attention_norm and post_mlp_norm, or query_norm
        and key_norm.
        """
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
        """Load the projections to query, key and value: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]."""
        return self._source.matrix(*(f"{self._prefix}self_attn.{name}_proj.weight" for name in "qkv"))

    def qkv_bias(self) -> torch.Tensor | None:
        """Load the bias of `qkv`: [(num_heads + 2 * num_kv_heads) * head_dim]; None for a model without one."""
        if not self._config.qkv_bias:
            return None
        return self._source.matrix(*(f"{self._prefix}self_attn.{name}_proj.bias" for name in "qkv"))

    def out(self) -> torch.Tensor:
        """Load the output projection [hidden_size, num_heads * head_dim]."""
        return self._matrix("self_attn.o_proj")

    def gate(self) -> torch.Tensor:
        """Load the gate projection [intermediate_size, hidden_size]."""
        return self._matrix("mlp.gate_proj")

    def up(self) -> torch.Tensor:
        """Load the up projection [intermediate_size, hidden_size]."""
        return self._matrix("mlp.up_proj")

    def down(self) -> torch.Tensor:
        """Load the down projection [hidden_size, intermediate_size]."""
        return self._matrix("mlp.down_proj")

    def gate_up(self) -> torch.Tensor:
        """Load gate and up as one matrix [2 * intermediate_size, hidden_size], gate first."""
        return torch.cat((self.gate(), self.up()))

    def _matrix(self, name: str) -> torch.Tensor:
        return self._source.matrix(f"{self._prefix}{name}.weight")
