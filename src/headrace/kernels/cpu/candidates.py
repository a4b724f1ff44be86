"""The CPU's candidates, best first, for the registry.

What lives here: the ordered lists. What may not: kernels, compiling, choosing.
"""

from __future__ import annotations

from headrace.kernels.candidate import Candidate

LINEAR: tuple[Candidate, ...] = ()
RMS_NORM: tuple[Candidate, ...] = ()
ROTARY_WRITE: tuple[Candidate, ...] = ()
PAGED_ATTENTION: tuple[Candidate, ...] = ()
GATED_ACTIVATION: tuple[Candidate, ...] = ()
MOE: tuple[Candidate, ...] = ()
