"""The embedding lookup. The CPU's form is `_embed` in kernels.models.cpu.fused_step."""
