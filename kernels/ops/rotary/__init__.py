"""Rotary position embedding. On the CPU it also writes K/V; the GPU's form is part of kernels.ops.store_kv.gpu."""
