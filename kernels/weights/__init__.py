"""Checkpoints on disk: found by `source`, opened by `checkpoint`, read tensor by tensor."""
