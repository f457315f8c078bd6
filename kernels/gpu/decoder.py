"""The Llama family's forward pass on a CUDA device: Triton kernels around cuBLAS's matrices.

It runs on CPU tensors too, through Triton's interpreter and without graphs: slow, but the whole of it can be held
against the reference where there is no GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.gpu.decode_graphs import DecodeGraphs
from kernels.gpu.kv_pool import GpuKVPool
from kernels.gpu.staged_batch import upload_batch
from kernels.gpu.staging import Staging
from kernels.models.rope import rotary_tables
from kernels.ops.paged_attention.gpu import paged_attention
from kernels.ops.rms_norm.gpu import rms_norm
from kernels.ops.silu_mul.gpu import silu_mul
from kernels.ops.store_kv.gpu import HeadNorm, Rotary, store_kv


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, those that share an input fused along their outputs."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: HeadNorm | None
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class GpuDecoderModel:
    """Weights under their Hugging Face names, bound to one KV pool; the pool's device is the model's.

    Step thread only. Batches come from the host and are copied to the device at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kv_pool: GpuKVPool,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        num_threads: int | None = None,  # noqa: ARG002  part of the signature that all models share
    ) -> None:
        if quantization != "none":
            raise ValueError(f"quantization is {quantization!r}; on a GPU it must be 'none'")
        self.config = config
        self.kv_pool = kv_pool
        self.device = kv_pool.blocks.device
        self._dtype = dtype
        self._layers = [self._load_layer(weights, i) for i in range(config.num_layers)]
        self._embedding = self._load(weights, "model.embed_tokens.weight")
        self._norm = self._load(weights, "model.norm.weight")
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else self._load(weights, "lm_head.weight")
        cos, sin = rotary_tables(config, config.max_position_embeddings)
        self._rotary = Rotary(cos.to(self.device), sin.to(self.device))
        self._staging = Staging(self.device)
        self._graphs = DecodeGraphs(self._run, self.device, kv_pool.block_size)

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices that every token passes through, the head not among them."""
        return sum(
            matrix.numel()
            for layer in self._layers
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )

    @property
    def weight_bytes(self) -> int:
        """What one step has to read: the layers' matrices and the head."""
        return self.layer_parameters * self._dtype.itemsize + self._head.nbytes

    def warmup(self) -> None:
        """Compile the kernels and capture the graphs of short contexts; the pool's contents survive."""
        with torch.inference_mode():
            self._run(upload_batch(self._staging, _prompt_of_two()))
            self._graphs.warmup()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K/V into the pool and give the logits [num_sampled, vocab_size] in float32.

        They are on the device and valid until the next call.
        """
        num_rows = batch.context_lens.shape[0]
        if batch.num_decode_rows == num_rows and num_rows <= self._graphs.max_batch:
            return self._graphs.forward(batch)
        return self._run(upload_batch(self._staging, batch))

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        """The forward pass over a batch on the device. Nothing here waits for the device: it is captured."""
        c = self.config
        residual = F.embedding(batch.token_ids, self._embedding)
        h = rms_norm(residual, self._layers[0].input_norm, c.rms_norm_eps)
        for i, layer in enumerate(self._layers):
            if i:
                h = rms_norm(h, layer.input_norm, c.rms_norm_eps, residual=residual)
            h = self._attend(h, layer, i, batch)
            h = rms_norm(h, layer.post_norm, c.rms_norm_eps, residual=residual)
            h = F.linear(silu_mul(F.linear(h, layer.gate_up)), layer.down)
        # Only rows that sample need the last norm and the head.
        h, residual = h[batch.sample_indices], residual[batch.sample_indices]
        h = rms_norm(h, self._norm, c.rms_norm_eps, residual=residual)
        return F.linear(h, self._head).float()

    def _attend(self, h: torch.Tensor, layer: _Layer, layer_idx: int, batch: ForwardBatch) -> torch.Tensor:
        kv = self.kv_pool.layer(layer_idx)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias)
        query = store_kv(qkv, batch.positions, batch.slot_mapping, self._rotary, kv, norm=layer.head_norm)
        scale = self.config.head_dim**-0.5
        attended = paged_attention(query, kv, batch, scale=scale, window=self.config.sliding_window)
        return F.linear(attended.flatten(1), layer.out)

    def _load_layer(self, weights: Mapping[str, torch.Tensor], layer_idx: int) -> _Layer:
        prefix = f"model.layers.{layer_idx}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        head_norm = None
        if self.config.qk_norm:
            query = self._load(weights, attention + "q_norm.weight")
            key = self._load(weights, attention + "k_norm.weight")
            head_norm = HeadNorm(query, key, self.config.rms_norm_eps)
        qkv_bias = None
        if self.config.qkv_bias:
            qkv_bias = self._load(weights, *(f"{attention}{name}_proj.bias" for name in "qkv"))
        return _Layer(
            input_norm=self._load(weights, prefix + "input_layernorm.weight"),
            qkv=self._load(weights, *(f"{attention}{name}_proj.weight" for name in "qkv")),
            qkv_bias=qkv_bias,
            head_norm=head_norm,
            out=self._load(weights, attention + "o_proj.weight"),
            post_norm=self._load(weights, prefix + "post_attention_layernorm.weight"),
            gate_up=self._load(weights, mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down=self._load(weights, mlp + "down_proj.weight"),
        )

    def _load(self, weights: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
        """The named tensors on the device, one under the other."""
        loaded = [weights[name].to(device=self.device, dtype=self._dtype) for name in names]
        return loaded[0] if len(loaded) == 1 else torch.cat(loaded)


def _prompt_of_two() -> ForwardBatch:
    """A prompt whose K/V goes nowhere; what it reads in block 0 does not matter."""
    return ForwardBatch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.arange(2),
        slot_mapping=torch.full((2,), -1, dtype=torch.int64),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        query_start=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([2], dtype=torch.int32),
        sample_indices=torch.tensor([1]),
        num_decode_rows=0,
    )
