"""From logits to token ids, so that a row's token depends on that row alone."""

from kernels.sampling.sampler import Sampler

__all__ = ["Sampler"]
