"""From logits to token ids, so that a row's token depends on that row alone. Both samplers follow `rules`."""
