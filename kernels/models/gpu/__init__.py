"""The decoder on a CUDA device."""
