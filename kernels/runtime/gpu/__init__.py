"""Uploads, read-backs, CUDA graphs and the KV pool of a device."""
