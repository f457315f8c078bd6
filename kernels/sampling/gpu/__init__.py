"""The sampler whose logits and tokens stay on the device."""
