"""Benchmarks, self-checks, the tuner and the ahead-of-time matrix. Nothing else in kernels imports them."""
