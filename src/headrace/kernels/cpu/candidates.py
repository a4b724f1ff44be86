"""The CPU's candidates, best first, for the registry.

What lives here: the ordered lists. What may not: kernels, compiling, choosing.
"""

from __future__ import annotations

from headrace.kernels.candidate import Candidate
from headrace.kernels.cpu import compressed, native, onednn, picking

NATIVE, COMPRESSED = "native", compressed.COMPRESSED

LINEAR = (
    Candidate(compressed.COMPRESSED, native.native_kernel(compressed.create_linear), asked=True),
    Candidate("onednn", onednn.create_linear, batch_invariant=False),
    Candidate(NATIVE, native.native_kernel(native.create_linear)),
)
RMS_NORM = (Candidate(NATIVE, native.native_kernel(native.create_rms_norm)),)
ROTARY_WRITE = (Candidate(NATIVE, native.native_kernel(native.create_rotary_write)),)
PAGED_ATTENTION = (Candidate(NATIVE, native.native_kernel(native.create_paged_attention)),)
ACTIVATION = (Candidate(NATIVE, native.native_kernel(native.create_activation)),)
GATED_ACTIVATION = (Candidate(NATIVE, native.native_kernel(native.create_gated_activation)),)
MOE = (Candidate(NATIVE, native.native_kernel(native.create_moe)),)
GUMBEL_ARGMAX = (Candidate(NATIVE, native.native_kernel(picking.create_gumbel_argmax)),)
PICK_TOKENS = (Candidate(NATIVE, native.native_kernel(picking.create_pick_tokens)),)
