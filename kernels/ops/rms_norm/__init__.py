"""RMS norm, with what is added before it; on the CPU also quantization of the normed rows."""
