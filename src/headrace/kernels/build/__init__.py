"""How kernels are built and launched: compilers, their caches, threads, launches.

What lives here: what every kernel in C, CUDA C++ or Triton needs, sources that several include. What may not:
mathematics of one operation.

Rules for Triton: modules of kernels are named ``triton_*``, and none is imported before a CUDA call site asks for a
kernel. Floats are widened after each load; every masked load names ``other``; block × stride products are 64 bits;
launch shapes follow from shapes the host knows, never from lengths, so that every kernel can be captured;
nothing is tuned at run time. ``PDL``: a constexpr around programmatic dependent launch. A kernel that carries it waits
before it reads what another wrote and before it writes; one without it (attention, random picks), or launched without,
begins when all before it have ended. A step's first, fetch_step, is launched so, and only lets the next one in.
"""
