"""The operations, and who carries each one out.

Every operation has a plain-torch twin (reference.py): the CPU fallback, the oracle in tests, the check in benchmarks.
Faster candidates stand before it in an ordered list; each accepts the static facts of a call site or declines with a reason.

What lives here: the registry. What may not: any kernel.

Operations and the facts a call site should state (unstated facts are taken as "anything may come", so a candidate may decline):
``linear`` (dtype, in_features, out_features, shared_weight), ``rms_norm``, ``layer_norm``, ``activation``, ``gated_activation`` (dtype),
``rotary_write``, ``paged_attention`` (dtype, head_dim, num_heads, num_kv_heads), ``moe`` (dtype, num_experts, top_k),
``fused_linear`` (dtype, in_features, out_features, gated), ``added_linear``, ``gated_linear`` (dtype, in_features, out_features),
``rope_attention`` (as ``paged_attention``, and rotary_dim, normed, window, soft_cap), ``decode_step`` (dtype, spec),
``embedding``, ``greedy_tokens``, ``pick_tokens``, ``gumbel_argmax``, ``score_tokens`` (dtype), ``fetch_step``, ``gather_inputs``,
``store_tokens``, ``write_rows`` (dtype, int32).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from headrace.errors import ConfigError, HeadraceError
from headrace.kernels import reference, rows, sampling, whole_step
from headrace.kernels.candidate import Candidate, Declined, Empty, Site, Sizes, plainly_empty
from headrace.kernels.cpu import candidates as cpu
from headrace.kernels.cuda import candidates as cuda
from headrace.kernels.cuda import gated_candidates as gated
from headrace.kernels.cuda import ring_candidates as ring
from headrace.kernels.cuda import rope_candidates as rope
from headrace.kernels.fallback import guarded
from headrace.kernels.triton import candidates as triton
from headrace.kernels.vendor import candidates as vendor
from headrace.kernels.vendor.into import linear_into

TWIN = "torch"
NOBODY = "nobody"  # takes a shortcut

_log = logging.getLogger(__name__)

# Best first; the twin stands behind each list. A candidate is removed with its room and its entry here.
CANDIDATES: Mapping[str, tuple[Candidate, ...]] = MappingProxyType(
    {
        "linear": cpu.LINEAR + triton.FLAT_LINEAR + vendor.LINEAR + triton.INVARIANT_LINEAR,
        "fused_linear": ring.RING_LINEAR + triton.FUSED_LINEAR,
        "added_linear": vendor.ADDED_LINEAR,
        "gated_linear": gated.GATED_LINEAR,
        "embedding": triton.EMBEDDING,
        "rms_norm": cpu.RMS_NORM + triton.RMS_NORM,
        "layer_norm": triton.LAYER_NORM,
        "rotary_write": cpu.ROTARY_WRITE + triton.ROTARY_WRITE,
        "paged_attention": cpu.PAGED_ATTENTION + triton.PAGED_ATTENTION,
        "rope_attention": rope.ROPE_ATTENTION,
        "activation": cpu.ACTIVATION + triton.ACTIVATION,
        "gated_activation": cpu.GATED_ACTIVATION + triton.GATED_ACTIVATION,
        "moe": cpu.MOE + triton.MOE,
        "greedy_tokens": triton.GREEDY_TOKENS,
        "pick_tokens": cpu.PICK_TOKENS + triton.PICK_TOKENS,
        "gumbel_argmax": cpu.GUMBEL_ARGMAX + triton.GUMBEL_ARGMAX,
        "score_tokens": triton.SCORE_TOKENS,
        "write_rows": triton.WRITE_ROWS,
        "gather_inputs": triton.GATHER_INPUTS,
        "store_tokens": triton.STORE_TOKENS,
        "decode_step": cuda.DECODE_STEP,
        "fetch_step": triton.FETCH_STEP,
    }
)

TWINS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "linear": reference.linear,
        "fused_linear": reference.fused_linear,
        "added_linear": reference.added_linear,
        "gated_linear": reference.gated_linear,
        "embedding": reference.embedding,
        "rms_norm": reference.rms_norm,
        "layer_norm": reference.layer_norm,
        "rotary_write": reference.rotary_write,
        "paged_attention": reference.paged_attention,
        "rope_attention": reference.rope_attention,
        "activation": reference.activation,
        "gated_activation": reference.gated_activation,
        "moe": reference.moe,
        "greedy_tokens": sampling.greedy_tokens,
        "pick_tokens": partial(sampling.pick_tokens, argmax=sampling.gumbel_argmax),
        "gumbel_argmax": sampling.gumbel_argmax,
        "score_tokens": sampling.score_tokens,
        "write_rows": rows.write_rows,
        "gather_inputs": rows.gather_inputs,
        "store_tokens": rows.store_tokens,
        "decode_step": whole_step.decode_step,
        "fetch_step": rows.fetch_step,
    }
)

# Twins whose bits depend on what else is in the batch: on the order of a sum, or on how far an element is from the tensor's end.
_TWINS_THAT_VARY = frozenset(
    {
        "linear", "fused_linear", "added_linear", "gated_linear", "paged_attention", "rope_attention", "moe", "rms_norm", "activation",
        "gated_activation",
    }
)  # fmt: skip
# Twins that look at the device (how long is this sequence, which rows are left to sort), which no graph can.
_TWINS_THAT_READ = frozenset({"paged_attention", "rope_attention", "moe", "rotary_write", "pick_tokens"})
# Operations whose callable makes a layer's callable from its weights.
_MAKERS = frozenset({"linear", "fused_linear", "added_linear", "gated_linear", "decode_step"})

Facts = tuple[tuple[str, Any], ...]
Key = tuple[str, Facts, str | None]  # the last: behind which candidate, for what that one leaves; None: before all


class StrictKernelError(HeadraceError):
    """``--strict-kernels`` is on and a call site would have fallen back to its torch twin."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Who carries out an operation at call sites with these facts, and why the ones before it do not.

    ``behind``: of what comes from there, what this candidate leaves to those after it; None: all of it.
    """

    op: str
    facts: Facts
    chosen: str
    declined: tuple[tuple[str, str], ...]  # (candidate, reason), best first
    behind: str | None = None


@dataclass(frozen=True, slots=True)
class _Chosen:
    """``made`` is the candidate's own callable; ``call`` what the call site gets."""

    site: Site
    choice: KernelChoice
    call: Callable[..., Any]
    candidate: Candidate | None = None  # None: the twin
    made: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One small call of a chosen candidate. ``run`` may be called from any thread; it raises what is not about building the kernel."""

    name: str
    call: Callable[[], object]
    give_way: Callable[[Exception], object]

    def run(self) -> None:
        try:
            self.call()
        except Exception as error:  # give_way raises it again unless it says that the kernel cannot be built
            self.give_way(error)


class Kernels:
    """Chooses once a call site, at construction time. ``choices`` is what ``headrace doctor`` prints.

    ``disabled`` names candidates never to choose, ``asked`` those that are chosen only so. ``strict``: a candidate of this device that
    declines is an error (one that was disabled by name is not). ``batch_invariant``: only kernels whose bits do not depend on the batch.
    ``programmatic``: a kernel may be launched while the one before still runs (on a GPU that can). ``unified_maximum``, ``cuda_prefill``,
    ``cuda_decode``, ``empty``: see Site.

    A candidate whose kernel turns out not to build on this device gives way to the next in the list, once, for all call sites with
    its facts; with ``strict`` the call that found out raises StrictKernelError. One that serves a part of what comes from a call site is
    told who serves the rest (Site.behind), which is chosen, rehearsed and gives way as any other.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        strict: bool = False,
        disabled: frozenset[str] = frozenset(),
        asked: frozenset[str] = frozenset(),
        batch_invariant: bool = False,
        programmatic: bool = False,
        unified_maximum: bool = False,
        cuda_prefill: bool = False,
        cuda_decode: bool = False,
        empty: Empty = plainly_empty,
    ) -> None:
        self.device = device
        self.batch_invariant = batch_invariant
        self._programmatic = programmatic
        self._unified_maximum = unified_maximum
        self._cuda_prefill = cuda_prefill
        self._cuda_decode = cuda_decode
        self._empty = empty
        self._strict = strict
        self._disabled, self._asked = disabled, asked
        self._chosen: dict[Key, _Chosen] = {}
        self._passed: list[KernelChoice] = []  # shortcuts that nobody takes
        self._failed: dict[tuple[Key, str], str] = {}  # (call sites, candidate) → what the compiler said
        self._retired: list[Callable[..., Any] | None] = []  # who gave way: graphs captured before go on using its scratch memory
        self._lock = threading.RLock()  # kernels are built in several threads
        known = {candidate.name for group in CANDIDATES.values() for candidate in group}
        if unknown := disabled - known:
            raise ConfigError(f"Unknown kernel candidates {sorted(unknown)} are disabled; the known ones are {sorted(known)}.")

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        return tuple(chosen.choice for chosen in self._chosen.values())

    @property
    def graphable(self) -> bool:
        """Whether nothing that was chosen for a GPU looks at it in the middle of a step."""
        return all(choice.chosen != TWIN or choice.op not in _TWINS_THAT_READ for choice in self.choices)

    def choose(self, op: str, **facts: Any) -> Callable[..., Any]:
        """The callable for ``op`` at a call site with these facts. Equal facts share one. Raises StrictKernelError, ConfigError."""
        return self._call((op, tuple(sorted(facts.items())), None))

    @property
    def passed(self) -> tuple[KernelChoice, ...]:
        """Shortcuts over whole decoders that candidates declined, and why; nobody is chosen."""
        return tuple(self._passed)

    def offer(self, op: str, *, reported: bool = False, **facts: Any) -> Callable[..., Any] | None:
        """As ``choose``, for a shortcut that a layer can do without: None where there is nobody but the twin.

        ``reported``: why there is nobody is kept for ``passed``.
        """
        key = (op, tuple(sorted(facts.items())), None)
        with self._lock:
            if key not in self._chosen:
                chosen = self._choose(key, optional=True)
                if chosen.candidate is None:
                    if reported and chosen.choice.declined:
                        self._passed.append(replace(chosen.choice, chosen=NOBODY))
                    return None
                self._chosen[key] = chosen
            return self._chosen[key].call

    def rehearsals(self, sizes: Sizes, *, since: int = 0) -> Iterator[Rehearsal]:
        """Independent small calls that build every kernel of the call sites so far, without the first ``since`` of ``choices``."""
        for key, chosen in list(self._chosen.items())[since:]:
            candidate, made = chosen.candidate, chosen.made
            if candidate is not None and made is not None and candidate.rehearse is not None:
                give_way = partial(self._give_way, key, candidate)
                site = f"{key[0]} {chosen.site.facts.get('dtype')}"
                yield from (Rehearsal(f"{site}: {name}", call, give_way) for name, call in candidate.rehearse(chosen.site, made, sizes))

    def _call(self, key: Key) -> Callable[..., Any]:
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = self._choose(key)
            return self._chosen[key].call

    def _choose(self, key: Key, *, optional: bool = False) -> _Chosen:
        op, facts, before = key
        flags = (self.batch_invariant, self._programmatic, self._unified_maximum, self._cuda_prefill, self._cuda_decode)
        site = Site(op, self.device, dict(facts), *flags, empty=self._empty)
        declined: list[tuple[str, Declined]] = []
        for candidate in _after(before, CANDIDATES[op]):
            if self.device.type not in candidate.devices or (candidate.asked and candidate.name not in self._asked):
                continue  # no news to anybody
            made = self._try(candidate, replace(site, behind=partial(self._call, (op, facts, candidate.name))), key)
            if not isinstance(made, Declined):
                choice = KernelChoice(op, facts, candidate.name, _reasons(declined), before)
                return _Chosen(site, choice, self._guarded(key, candidate, made), candidate, made)
            declined.append((candidate.name, made))
        if not optional:
            self._check_twin(op, declined)
        return _Chosen(site, KernelChoice(op, facts, TWIN, _reasons(declined), before), self._twin(op))

    def _twin(self, op: str) -> Callable[..., Any]:
        """On a GPU the library's product is no makeshift, and lies where others do."""
        if op == "linear" and self.device.type == "cuda" and self._empty is not plainly_empty:
            return partial(linear_into, empty=self._empty)
        return TWINS[op]

    def _try(self, candidate: Candidate, site: Site, key: Key) -> Callable[..., Any] | Declined:
        if candidate.name in self._disabled:
            return Declined("disabled by configuration")
        if self.batch_invariant and not candidate.batch_invariant:
            return Declined("its sums depend on what else is in the batch")
        if (said := self._failed.get((key, candidate.name))) is not None:
            return Declined(f"did not compile: {said}")
        return candidate.create(site)

    def _guarded(self, key: Key, candidate: Candidate, made: Callable[..., Any]) -> Callable[..., Any]:
        if candidate.failure is None:
            return made
        return guarded(made, partial(self._give_way, key, candidate), makes=key[0] in _MAKERS)

    def _give_way(self, key: Key, candidate: Candidate, error: Exception) -> Callable[..., Any]:
        """Who takes over from ``candidate``. Raises ``error`` if it is about something else, StrictKernelError if nobody may."""
        said = None if candidate.failure is None else candidate.failure(error)
        if said is None:
            raise error
        with self._lock:
            first, self._failed[key, candidate.name] = (key, candidate.name) not in self._failed, said
            if self._chosen[key].candidate is candidate:
                successor = self._choose(key)
                self._retired.append(self._chosen[key].made)
                self._chosen[key] = successor
            if first:
                chosen = self._chosen[key].choice.chosen
                _log.warning("kernel %s of %s does not compile here: %s; %s runs instead", candidate.name, key[0], said, chosen)
            return self._chosen[key].call

    def _check_twin(self, op: str, declined: list[tuple[str, Declined]]) -> None:
        """The twin is the last resort: is it allowed here?"""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in _reasons(declined)) or "there is no other candidate"
        if self.batch_invariant and op in _TWINS_THAT_VARY:
            raise ConfigError(f"No batch-invariant kernel for {op} ({reasons}). Mend what it lacks or drop --batch-invariant.")
        if self._strict and any(not each.by_choice for name, each in declined if name not in self._disabled):
            raise StrictKernelError(f"{op} would fall back to its torch twin ({reasons}). Mend that or drop --strict-kernels.")


def _after(before: str | None, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    names = [candidate.name for candidate in candidates]
    return candidates if before is None else candidates[names.index(before) + 1 :]


def _reasons(declined: Sequence[tuple[str, Declined]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, each.reason) for name, each in declined)
