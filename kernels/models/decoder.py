"""Natively supported decoders: Llama, Mistral, Qwen2, Qwen3, SmolLM, Gemma 3."""

from collections.abc import Mapping

import torch

from kernels.batch import ForwardBatch
from kernels.config import ModelConfig
from kernels.models.cpu.decoder import FusedDecoder, fused_supported
from kernels.models.gemma3 import Gemma3Decoder
from kernels.models.portable import PortableDecoder
from kernels.runtime.kv_pool import KVPool


class DecoderModel:
    """Weights under their Hugging Face names, bound to one KV pool. Used by one thread at a time.

    On processors with AVX-512 a bfloat16 model runs as one compiled call per step; everything else takes a portable
    path, of which Gemma 3 has its own. `quantization` is "none" or "int8".
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kv_pool: KVPool,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        num_threads: int | None = None,
    ) -> None:
        if quantization not in ("none", "int8"):
            raise ValueError(f"quantization is {quantization!r}; known are none and int8")
        self.config = config
        self.kv_pool = kv_pool
        quantized = quantization == "int8"
        self._decoder: FusedDecoder | PortableDecoder | Gemma3Decoder
        if fused_supported(config, kv_pool, dtype, quantized=quantized):
            self._decoder = FusedDecoder(
                config, weights, kv_pool, quantized=quantized, num_threads=num_threads
            )
        elif config.gemma3 is not None:
            self._decoder = Gemma3Decoder(
                config, config.gemma3, weights, kv_pool, dtype=dtype, quantized=quantized
            )
        else:
            self._decoder = PortableDecoder(config, weights, kv_pool, dtype=dtype, quantized=quantized)

    @property
    def is_fused(self) -> bool:
        return isinstance(self._decoder, FusedDecoder)

    def warmup(self) -> None:
        """Compile everything that a step may need; the pool's contents survive."""
        self._decoder.warmup()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K/V into the pool and give the logits [num_sampled, vocab_size] in float32.

        They may be overwritten by the next call.
        """
        return self._decoder.forward(batch)
