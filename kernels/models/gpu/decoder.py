"""The forward pass of the native families on a CUDA device: Triton kernels around cuBLAS's matrices.

It runs on CPU tensors too, through Triton's interpreter and without graphs: slow, but the whole of it can be held
against the reference where there is no GPU.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.models.gpu.layers import Layer, LayerLoader
from kernels.ops.embed_tokens.gpu import embed_tokens
from kernels.ops.paged_attention.gpu import paged_attention
from kernels.ops.rms_norm.gpu import rms_norm
from kernels.ops.silu_mul.gpu import silu_mul
from kernels.ops.store_kv.gpu import store_kv
from kernels.runtime.gpu.decode_graphs import BATCH_BUCKETS, DecodeGraphs
from kernels.runtime.gpu.kv_pool import GpuKVPool
from kernels.runtime.gpu.step_inputs import StepInputs


class GpuDecoderModel:
    """Weights under their Hugging Face names, bound to one KV pool; the pool's device is the model's.

    Step thread only. Batches come from the host and are copied to the device at once; a token id of -1 - seat is the
    one that `inputs` has for the seat and the position. `forward` does not wait for the device.
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
        """inputs: shared with the sampler; None when there is none. max_model_len: tokens, what warmup prepares for."""
        self.config = config
        self.kv_pool = kv_pool
        self.device = kv_pool.device
        self._dtype = dtype
        self._inputs = inputs or StepInputs(self.device, BATCH_BUCKETS[-1])
        num_positions = min(config.max_position_embeddings, kv_pool.num_blocks * kv_pool.block_size)
        self._max_model_len = num_positions if max_model_len is None else max_model_len
        loader = LayerLoader(config, weights, self.device, dtype, num_positions)
        self._layers = [loader.layer(layer_idx) for layer_idx in range(config.num_layers)]
        self._embedding = loader.matrix("model.embed_tokens.weight")
        self._norm = loader.norm("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else loader.matrix("lm_head.weight")
        self._embedding_scale: float | None = None
        self._attention_scale = config.head_dim**-0.5
        if config.gemma3 is not None:
            # Rounded to the model's type as in training: 640 ** 0.5 is 25.25 in bfloat16.
            self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=dtype))
            self._attention_scale = config.gemma3.attention_scale
        self._graphs = DecodeGraphs(self._run, self._inputs, kv_pool.block_size)

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices that every token passes through, the head not among them."""
        return sum(layer.num_parameters for layer in self._layers)

    @property
    def weight_bytes(self) -> int:
        """What one step has to read: the layers' matrices and the head."""
        return self.layer_parameters * self._dtype.itemsize + self._head.nbytes

    def warmup(self) -> None:
        """Compile the kernels and capture the graphs; the pool's contents survive."""
        with torch.inference_mode():
            self._run(self._inputs.upload_batch(_prompt_of_two()))
            self._graphs.warmup(self._max_model_len)
            self.kv_pool.copy_blocks([(0, 0)])

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K/V into the pool and give the logits [num_sampled, vocab_size] in float32.

        They are on the device and valid until the next call, in stream order.
        """
        num_rows = batch.context_lens.shape[0]
        if batch.num_decode_rows == num_rows and num_rows <= self._graphs.max_batch:
            return self._graphs.forward(batch)
        return self._run(self._inputs.upload_batch(batch))

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        """The forward pass over a batch on the device. Nothing here waits for the device: it is captured."""
        eps, is_gelu = self.config.rms_norm_eps, self.config.gemma3 is not None
        residual = embed_tokens(
            batch.token_ids, batch.positions, self._inputs.ring, self._embedding, scale=self._embedding_scale
        )
        h = rms_norm(residual, self._layers[0].input_norm, eps)
        fed_norm: torch.Tensor | None = None
        for layer_idx, layer in enumerate(self._layers):
            if layer_idx:
                h = rms_norm(h, layer.input_norm, eps, residual=residual, branch_weight=fed_norm)
            h = self._attend(h, layer, layer_idx, batch)
            h = rms_norm(h, layer.mlp_norm, eps, residual=residual, branch_weight=layer.attended_norm)
            h = F.linear(silu_mul(F.linear(h, layer.gate_up), gelu_tanh=is_gelu), layer.down)
            fed_norm = layer.fed_norm
        # Only rows that sample need the last norm and the head.
        h, residual = h[batch.sample_indices], residual[batch.sample_indices]
        h = rms_norm(h, self._norm, eps, residual=residual, branch_weight=fed_norm)
        return F.linear(h, self._head).float()

    def _attend(self, h: torch.Tensor, layer: Layer, layer_idx: int, batch: ForwardBatch) -> torch.Tensor:
        kv = self.kv_pool.layer(layer_idx)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias)
        query = store_kv(qkv, batch.positions, batch.slot_mapping, layer.rotary, kv, norm=layer.head_norm)
        attended = paged_attention(query, kv, batch, scale=self._attention_scale, window=layer.window)
        return F.linear(attended.flatten(1), layer.out)


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
