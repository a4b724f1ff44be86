"""The candidate for gate and what it gates as one product, for the registry.

What lives here: what declines a call site before anything is compiled, and what a start builds. What may not: kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from headrace.kernels.candidate import Candidate, Declined, Site, Sizes
from headrace.kernels.cuda.gated_measured import measured_tiles

GATED = "gated"


def _create(site: Site) -> Callable[..., Any] | Declined:
    """Whoever is declined loses nothing but speed: a product and an activation stand behind it."""
    outs, ins, dtype = site.facts.get("out_features"), site.facts.get("in_features"), site.facts.get("dtype")
    if outs is None or ins is None or dtype is not torch.bfloat16:
        return Declined("only weights of bfloat16 whose shape is known are served", by_choice=True)
    if torch.cuda.get_device_capability(site.device) != (9, 0):
        return Declined("its matrix instruction is that of compute capability 9.0", by_choice=True)
    if outs % 16 or ins % 8:
        return Declined(f"{ins} to {outs} is no weight with rows that the copy engine can read", by_choice=True)
    tiles = measured_tiles(torch.cuda.get_device_name(site.device)).get((outs // 2, ins), ())
    if not any(tile for _, tile in tiles):
        return Declined("nothing was measured to be better than product and activation for this weight", by_choice=True)
    made: Callable[..., Any] = import_module("headrace.kernels.cuda.gated").create_gated(site)
    return made


def _rehearse(site: Site, make: Callable[..., Any], sizes: Sizes) -> Iterable[tuple[str, Callable[[], object]]]:
    layer = make(torch.empty(0, 0), None)
    for tile in dict.fromkeys(tile for _, tile in reversed(layer.tiles) if tile is not None):  # those for many rows compile longest
        yield f"{tile}", partial(layer.kernels.function, tile, sizes.spec.activation, site.facts["out_features"] // 2)


def _failure(error: Exception) -> str | None:
    reason: str | None = import_module("headrace.kernels.cuda.gated").build_failure(error)
    return reason


GATED_LINEAR = (Candidate(GATED, _create, ("cuda",), batch_invariant=False, failure=_failure, rehearse=_rehearse),)
