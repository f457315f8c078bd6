"""The gate of the MLP: activation(gate) * up. The CPU's form is part of the product, kernels.ops.linear.cpu_finish."""
