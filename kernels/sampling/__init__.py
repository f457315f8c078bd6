"""Samplers from logits to token ids: a row's token depends on that row alone. Both samplers follow `rules`."""
