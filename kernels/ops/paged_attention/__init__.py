"""Causal attention over the blocks of each row."""
