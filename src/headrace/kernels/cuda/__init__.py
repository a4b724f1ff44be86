"""Kernels in CUDA C++, compiled on the machine they run on.

What lives here: sources (csrc/), their compiler (NVRTC) with its cache, and launches through the driver. What may not: Triton.
"""
