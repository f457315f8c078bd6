"""The forward pass of the native families on a CUDA device: Triton kernels around cuBLAS's matrices.

It also runs on CPU tensors, in Triton's interpreter and without graphs. That is slow, but lets tests compare the whole
forward pass with the reference where there is no GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from kernels.batch import ForwardBatch
from kernels.model_config import ModelConfig
from kernels.models.decoder_weights import DecoderWeights, rounded_embedding_scale
from kernels.models.rope import RotaryTables
from kernels.ops.embed_tokens.gpu import embed_tokens
from kernels.ops.paged_attention.gpu import paged_attention
from kernels.ops.rms_norm.gpu import rms_norm
from kernels.ops.silu_mul.gpu import silu_mul
from kernels.ops.store_kv.gpu import HeadNorm, Rotary, store_kv
from kernels.runtime.gpu.decode_graphs import BATCH_BUCKETS, DecodeGraphs
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.gpu.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, fused along outputs that share an input."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: HeadNorm | None
    out: torch.Tensor
    post_attention_norm: torch.Tensor | None
    """Applied to attention's output before it is added."""
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    post_mlp_norm: torch.Tensor | None
    """Applied to the MLP's output before it is added."""
    rotary: Rotary
    window: int | None

    @property
    def num_parameters(self) -> int:
        """Number of elements of the matrices."""
        return sum(matrix.numel() for matrix in (self.qkv, self.out, self.gate_up, self.down))


def _load_layer(source: DecoderWeights, rotary: RotaryTables, layer_idx: int) -> Layer:
    config, layer = source.config, source.layer(layer_idx)
    norms = layer.norms()
    head_norm = None
    if config.qk_norm:
        head_norm = HeadNorm(norms["query_norm"], norms["key_norm"], config.rms_norm_eps)
    return Layer(
        input_norm=norms["input_norm"],
        qkv=layer.qkv(),
        qkv_bias=layer.qkv_bias(),
        head_norm=head_norm,
        out=layer.out(),
        post_attention_norm=norms.get("post_attention_norm"),
        mlp_norm=norms["mlp_norm"],
        gate_up=layer.gate_up(),
        down=layer.down(),
        post_mlp_norm=norms.get("post_mlp_norm"),
        rotary=Rotary(*rotary.of(layer_idx)),
        window=config.window(layer_idx),
    )


class GpuDecoderModel:
    """A decoder with its weights, bound to one KV pool; it runs on the pool's device.

    Step thread only. Batches come from the host and are copied to the device at once. A token id of -1 - slot stands
    for the token that `inputs` has for the slot and the position. `forward` does not wait for the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kv_pool: GpuKVPool,
        *,
        dtype: torch.dtype,
        inputs: StepInputs | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """weights: by Hugging Face name, matrices [num_outputs, num_inputs], norms and biases [size], any float type.

        inputs: shared with the sampler; None without one. max_model_len: the longest context to warm up for.
        """
        self.config = config
        self.kv_pool = kv_pool
        self.device = kv_pool.device
        self._dtype = dtype
        self._inputs = inputs or StepInputs(self.device, BATCH_BUCKETS[-1])
        num_positions = min(config.max_position_embeddings, kv_pool.num_blocks * kv_pool.block_size)
        self._max_model_len = num_positions if max_model_len is None else max_model_len
        source = DecoderWeights(config, weights, self.device, dtype)
        rotary = RotaryTables(config, num_positions, self.device)
        self._layers = [_load_layer(source, rotary, layer_idx) for layer_idx in range(config.num_layers)]
        self._embedding = source.embedding()
        self._norm = source.final_norm()
        self._head = source.head(self._embedding)
        self._embedding_scale: float | None = None
        if config.embedding_scale != 1.0:
            self._embedding_scale = rounded_embedding_scale(config, dtype)
        self._graphs = DecodeGraphs(self._run, self._inputs, kv_pool.block_size)

    @property
    def layer_parameters(self) -> int:
        """Number of elements of the matrices that every token is multiplied with, without the head."""
        return sum(layer.num_parameters for layer in self._layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: the layers' matrices and the head."""
        return self.layer_parameters * self._dtype.itemsize + self._head.nbytes

    def warmup(self) -> None:
        """Compile the kernels and capture the graphs; the pool's contents survive."""
        with torch.inference_mode():
            self._run(self._inputs.upload_batch(_prompt_of_two()))
            self._graphs.warmup(self._max_model_len)
            self.kv_pool.copy_blocks([(0, 0)])

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K/V into the pool and return the logits [num_sampled, vocab_size] in float32.

        The logits are on the device and valid until the next call, in stream order.
        """
        num_rows = batch.context_lens.shape[0]
        if batch.num_decode_rows == num_rows and num_rows <= self._graphs.max_batch:
            return self._graphs.forward(batch)
        return self._run(self._inputs.upload_batch(batch))

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        """The forward pass over a batch on the device. Nothing here waits for the device: it is captured."""
        eps, is_gelu = self.config.rms_norm_eps, self.config.activation == "gelu_tanh"
        residual = embed_tokens(
            batch.token_ids, batch.positions, self._inputs.ring, self._embedding, scale=self._embedding_scale
        )
        h = rms_norm(residual, self._layers[0].input_norm, eps)
        post_mlp_norm: torch.Tensor | None = None
        for layer_idx, layer in enumerate(self._layers):
            if layer_idx:
                h = rms_norm(h, layer.input_norm, eps, residual=residual, branch_weight=post_mlp_norm)
            h = self._attend(h, layer, layer_idx, batch)
            h = rms_norm(h, layer.mlp_norm, eps, residual=residual, branch_weight=layer.post_attention_norm)
            h = F.linear(silu_mul(F.linear(h, layer.gate_up), gelu_tanh=is_gelu), layer.down)
            post_mlp_norm = layer.post_mlp_norm
        # Only rows that sample need the last norm and the head.
        h, residual = h[batch.sample_indices], residual[batch.sample_indices]
        h = rms_norm(h, self._norm, eps, residual=residual, branch_weight=post_mlp_norm)
        return F.linear(h, self._head).float()

    def _attend(self, h: torch.Tensor, layer: Layer, layer_idx: int, batch: ForwardBatch) -> torch.Tensor:
        kv = self.kv_pool.layer(layer_idx)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias)
        query = store_kv(qkv, batch.positions, batch.slot_mapping, layer.rotary, kv, norm=layer.head_norm)
        attended = paged_attention(query, kv, batch, scale=self.config.score_scale, window=layer.window)
        return F.linear(attended.flatten(1), layer.out)


def _prompt_of_two() -> ForwardBatch:
    """A prompt whose K/V is not written; what it reads from block 0 does not matter."""
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
