"""The kit for compiled CPU functions: Numba with LLVM instructions, register tiles, and threads that share a step."""
