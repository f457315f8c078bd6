"""The kit for Triton kernels: compile, interpret or record a launch, and the launch parameters of each device."""
