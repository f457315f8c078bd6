"""Writing keys and values into their blocks. The CPU's form is part of kernels.ops.rotary.cpu."""
