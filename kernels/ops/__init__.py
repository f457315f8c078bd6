"""One folder per operation, each with its forms side by side: cpu.py, gpu.py, reference.py (plain torch, what the
others are tested against) and portable.py (torch, for any device). `cpu` and `gpu` are the kits that the compiled CPU
functions and the Triton kernels are written with. A form that is part of another operation is named in the folder.
"""
