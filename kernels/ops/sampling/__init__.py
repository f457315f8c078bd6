"""Sampling from logits on the GPU. The CPU's form is kernels.sampling.cpu, which is also the reference."""

SPAN = 256
"""Weights are summed in spans first, so that a draw walks vocab_size / SPAN sums and one span, not every weight."""
