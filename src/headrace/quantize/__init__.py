"""Creates quantized checkpoints: ``headrace quantize``.

    grid        low-bit numbers for a matrix: scales, zeros, codes
    gptq        codes that compensate for each other's errors
    scaling     input channels made easier to round, at their producers' cost (AWQ, SmoothQuant)

What lives here: choosing the numbers. What may not: what a running engine does with them (quant/), kernels.
"""
