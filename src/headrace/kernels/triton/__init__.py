"""Kernels for NVIDIA GPUs, written in Triton.

What lives here: one file an operation (the kernel and a thin function with the twin's signature), and candidates.py, the only file the
registry imports. What may not: model knowledge; importing triton before a CUDA call site asks for a kernel.

House rules: floats are widened after each load; every masked load names ``other``; block × stride products are 64 bits; launch shapes
follow from shapes the host knows, never from lengths, so that every kernel can be captured into a graph; nothing is tuned at run time.
``PDL``: a constexpr around programmatic dependent launch. A kernel that carries it waits before it reads what another wrote and before it
writes; launched without it (attention, experts, random picks) a kernel begins when all before it have ended. A step's first, fetch_step, is
launched so, and only lets the next one in.
"""
