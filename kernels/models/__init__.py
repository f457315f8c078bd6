"""Decoders over a KV pool: portable (torch), `cpu` (one compiled call per step), `gpu` (Triton), `transformers`."""
