"""Whether the GPU here can be computed on: what was found, what is needed.

What lives here: judging torch's and the driver's answers. What may not: choosing (settings.py), memory, printing.

A context is not made, so that looking costs the card nothing.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch

from headrace.worker.driver import DriverFacts, ask_driver

MIN_CAPABILITY = (8, 0)  # Ampere: bfloat16 matrix instructions and asynchronous copies, which every kernel builds on


@dataclass(frozen=True, slots=True)
class GPU:
    """``name`` None: there is none. ``problem``, if any, is one clause: found …; needed is …"""

    name: str | None
    problem: str | None = None
    capability: tuple[int, int] | None = None


def find_gpu() -> GPU:
    """The GPU that torch would use."""
    with warnings.catch_warnings(record=True) as said:  # an old driver is no more than a warning of torch's
        warnings.simplefilter("always")
        present = bool(torch.cuda.is_available())
    if not present:
        return _absent(ask_driver(), " ".join(str(warning.message) for warning in said))
    try:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except RuntimeError as error:
        return GPU("an NVIDIA GPU", f"found an NVIDIA GPU that does not start ({_first_line(str(error))}); needed is one that does")
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
        return GPU(name, f"found {name} of compute capability {found}; needed is {needed} (Ampere) or newer", capability)
    return GPU(name, None, capability)


def _absent(driver: DriverFacts | None, said: str) -> GPU:
    """Why torch sees no GPU."""
    if driver is None or not driver.cards:
        return GPU(None, "found no NVIDIA GPU with a driver; needed is one of compute capability 8.0 or newer")
    name, built_for = driver.cards[0].name, torch.version.cuda
    if built_for is None:
        return GPU(name, f"found {name}, but torch {torch.__version__} is built without CUDA; needed is a CUDA build of torch")
    if driver.cuda[0] < int(built_for.split(".")[0]):
        newest = ".".join(map(str, driver.cuda))
        found = f"found {name} with driver {driver.version}, which runs CUDA up to {newest}"
        return GPU(name, f"{found}; needed is a driver for CUDA {built_for}, which torch {torch.__version__} is built for")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return GPU(name, f"found {name}, but CUDA_VISIBLE_DEVICES is {hidden!r} and hides it; needed is its number there")
    return GPU(name, f"found {name} with driver {driver.version}, but torch cannot use it ({_first_line(said) or 'it does not say why'})")


def _first_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "")
