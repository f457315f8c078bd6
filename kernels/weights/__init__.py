"""Checkpoints on disk: Hugging Face folders and GGUF files, read tensor by tensor."""

from kernels.weights.checkpoint import Checkpoint, Weights, open_checkpoint

__all__ = ["Checkpoint", "Weights", "open_checkpoint"]
