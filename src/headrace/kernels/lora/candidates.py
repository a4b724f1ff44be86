"""The candidates for what adapters add to a product, best first.

What lives here: the ordered list. What may not: kernels.
"""

from __future__ import annotations

from headrace.kernels.build.native import native
from headrace.kernels.lora.native import create_add_deltas

ADD_DELTAS = (native(create_add_deltas),)
