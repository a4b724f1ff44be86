"""The operations, and who carries each one out.

Every operation has a plain-torch twin (reference.py): the CPU fallback, the oracle in tests, the check in benchmarks.
Faster candidates stand before it in an ordered list; each accepts the static facts of a call site or declines with a reason.

What lives here: the registry. What may not: any kernel.

Operations and the facts a call site should state (unstated facts are taken as "anything may come", so a candidate may decline):
``linear`` (dtype, in_features, out_features, shared_weight), ``rms_norm``, ``layer_norm``, ``activation``, ``gated_activation`` (dtype),
``rotary_write``, ``paged_attention`` (dtype, head_dim, num_heads, num_kv_heads), ``moe`` (dtype, num_experts, top_k),
``embedding``, ``greedy_tokens``, ``pick_tokens``, ``gumbel_argmax``, ``score_tokens`` (dtype), ``gather_inputs``, ``store_tokens`` (dtype, int32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from headrace.errors import ConfigError, HeadraceError
from headrace.kernels import reference, rows, sampling
from headrace.kernels.candidate import Candidate, Declined, Site
from headrace.kernels.cpu import candidates as cpu
from headrace.kernels.triton import candidates as triton

TWIN = "torch"

# Best first; the twin stands behind each list. A candidate is removed with its room and its entry here.
CANDIDATES: Mapping[str, tuple[Candidate, ...]] = MappingProxyType(
    {
        "linear": cpu.LINEAR,
        "embedding": triton.EMBEDDING,
        "rms_norm": cpu.RMS_NORM + triton.RMS_NORM,
        "layer_norm": triton.LAYER_NORM,
        "rotary_write": cpu.ROTARY_WRITE + triton.ROTARY_WRITE,
        "paged_attention": cpu.PAGED_ATTENTION + triton.PAGED_ATTENTION,
        "activation": triton.ACTIVATION,
        "gated_activation": cpu.GATED_ACTIVATION + triton.GATED_ACTIVATION,
        "moe": cpu.MOE + triton.MOE,
        "greedy_tokens": triton.GREEDY_TOKENS,
        "pick_tokens": cpu.PICK_TOKENS + triton.PICK_TOKENS,
        "gumbel_argmax": cpu.GUMBEL_ARGMAX + triton.GUMBEL_ARGMAX,
        "score_tokens": triton.SCORE_TOKENS,
        "gather_inputs": triton.GATHER_INPUTS,
        "store_tokens": triton.STORE_TOKENS,
    }
)

TWINS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "linear": reference.linear,
        "embedding": reference.embedding,
        "rms_norm": reference.rms_norm,
        "layer_norm": reference.layer_norm,
        "rotary_write": reference.rotary_write,
        "paged_attention": reference.paged_attention,
        "activation": reference.activation,
        "gated_activation": reference.gated_activation,
        "moe": reference.moe,
        "greedy_tokens": sampling.greedy_tokens,
        "pick_tokens": partial(sampling.pick_tokens, argmax=sampling.gumbel_argmax),
        "gumbel_argmax": sampling.gumbel_argmax,
        "score_tokens": sampling.score_tokens,
        "gather_inputs": rows.gather_inputs,
        "store_tokens": rows.store_tokens,
    }
)

# Twins whose order of summation depends on what else is in the batch.
_TWINS_THAT_VARY = frozenset({"linear", "paged_attention", "moe"})


class StrictKernelError(HeadraceError):
    """``--strict-kernels`` is on and a call site would have fallen back to its torch twin."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Who carries out an operation at call sites with these facts, and why the ones before it do not."""

    op: str
    facts: tuple[tuple[str, Any], ...]
    chosen: str
    declined: tuple[tuple[str, str], ...]  # (candidate, reason), best first


class Kernels:
    """Chooses once a call site, at construction time. ``choices`` is what ``headrace doctor`` prints.

    ``disabled`` names candidates never to choose. ``strict``: a candidate of this device that declines is an error
    (one that was disabled by name is not). ``batch_invariant``: only kernels whose bits do not depend on the batch.
    """

    def __init__(self, device: torch.device, *, strict: bool = False, disabled: frozenset[str] = frozenset(), batch_invariant: bool = False) -> None:
        self.device = device
        self.batch_invariant = batch_invariant
        self._strict = strict
        self._disabled = disabled
        self._chosen: dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[Callable[..., Any], KernelChoice]] = {}
        known = {candidate.name for group in CANDIDATES.values() for candidate in group}
        if unknown := disabled - known:
            raise ConfigError(f"Unknown kernel candidates {sorted(unknown)} are disabled; the known ones are {sorted(known)}.")

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        return tuple(choice for _, choice in self._chosen.values())

    def choose(self, op: str, **facts: Any) -> Callable[..., Any]:
        """The callable for ``op`` at a call site with these facts. Equal facts share one. Raises StrictKernelError, ConfigError."""
        key = (op, tuple(sorted(facts.items())))
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key][0]

    def _choose(self, op: str, facts: tuple[tuple[str, Any], ...]) -> tuple[Callable[..., Any], KernelChoice]:
        site = Site(op, self.device, dict(facts), self.batch_invariant)
        declined: list[tuple[str, str]] = []
        for candidate in CANDIDATES[op]:
            if self.device.type not in candidate.devices:
                continue  # no news to anybody
            made = self._try(candidate, site)
            if not isinstance(made, Declined):
                return made, KernelChoice(op, facts, candidate.name, tuple(declined))
            declined.append((candidate.name, made.reason))
        self._check_twin(op, declined)
        return TWINS[op], KernelChoice(op, facts, TWIN, tuple(declined))

    def _try(self, candidate: Candidate, site: Site) -> Callable[..., Any] | Declined:
        if candidate.name in self._disabled:
            return Declined("disabled by configuration")
        if self.batch_invariant and not candidate.batch_invariant:
            return Declined("its sums depend on what else is in the batch")
        return candidate.create(site)

    def _check_twin(self, op: str, declined: list[tuple[str, str]]) -> None:
        """The twin is the last resort: is it allowed here?"""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in declined) or "there is no other candidate"
        if self.batch_invariant and op in _TWINS_THAT_VARY:
            raise ConfigError(f"No batch-invariant kernel for {op} ({reasons}). Mend what it lacks or drop --batch-invariant.")
        here = {candidate.name for candidate in CANDIDATES[op] if self.device.type in candidate.devices} - self._disabled
        if self._strict and here:
            raise StrictKernelError(f"{op} would fall back to its torch twin ({reasons}). Mend that or drop --strict-kernels.")
