"""The sampler of logits on the host."""
