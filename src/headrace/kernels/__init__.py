"""Who carries an operation out at a call site.

Every operation (operations.py) has a plain-torch twin: the CPU fallback, the oracle in tests, the check in benchmarks.
Faster candidates stand before it in an ordered list; each accepts the static facts of a call site or declines with a
reason.

What lives here: choosing. What may not: any kernel, the list.

What a call site states is its operation's kind of facts (candidate.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from headrace.errors import ConfigError, HeadraceError
from headrace.kernels.candidate import (
    CallSite,
    Candidate,
    Card,
    Declined,
    Empty,
    F,
    Facts,
    KernelContext,
    Sizes,
    plainly_empty,
)
from headrace.kernels.linear.reference import linear_into
from headrace.kernels.operations import OPERATIONS, Operation, S

TWIN = "torch"
NOBODY = "nobody"  # takes a shortcut
# Techniques that are a candidate's own; others change what some do.
DECLARED = frozenset[str]().union(*(each.techniques for op in OPERATIONS.values() for each in op.candidates))

_log = logging.getLogger(__name__)

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

    choice: KernelChoice
    call: Any
    site: CallSite[Any] | None = None
    candidate: Candidate[Any] | None = None  # None: the twin
    made: Any = None


@dataclass(frozen=True, slots=True)
class WarmUp:
    """One small call of a chosen candidate. ``run`` may be called from any thread; it raises what is not about building
    the kernel."""

    name: str
    call: Callable[[], object]
    give_way: Callable[[Exception], object]
    turn: int  # of its operation

    def run(self) -> None:
        try:
            self.call()
        except Exception as error:  # give_way raises it again unless it says that the kernel cannot be built
            self.give_way(error)


class Kernels:
    """Chooses once a call site, at construction time. ``choices`` is what ``headrace doctor`` prints.

    ``techniques``: those in use; candidates of others are never chosen, nor are those that ``disabled`` names.
    ``strict``: a candidate of this device that declines is an error, unless it was switched off or is optional.
    ``card``: instead of the one that torch finds. ``empty``: where results of many rows get their memory.

    A candidate whose kernel turns out not to build on this device gives way to the next in the list, once, for all call
    sites with its facts; with ``strict`` the call that found out raises StrictKernelError. One that serves a part of
    what comes from a call site is told who serves the rest (CallSite.behind), which is chosen, warmed up and gives way
    as any other.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        strict: bool = False,
        techniques: frozenset[str] = DECLARED,
        disabled: frozenset[str] = frozenset(),
        card: Card | None = None,
        empty: Empty = plainly_empty,
    ) -> None:
        self.device = device
        self.context = KernelContext(card or Card.of(device), techniques, disabled, empty)
        self._strict = strict
        self._chosen: dict[Key, _Chosen] = {}
        self._passed: list[KernelChoice] = []  # shortcuts that nobody takes
        self._failed: dict[tuple[Key, str], str] = {}  # (call sites, candidate) → what the compiler said
        self._retired: list[object] = []  # who gave way: what was captured before goes on using its scratch memory
        self._lock = threading.RLock()  # kernels are built in several threads
        known = {candidate.name for op in OPERATIONS.values() for candidate in op.candidates}
        if unknown := disabled - known:
            raise ConfigError(
                f"Unknown kernel candidates {sorted(unknown)} are disabled; the known ones are {sorted(known)}."
            )

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        return tuple(chosen.choice for chosen in self._chosen.values())

    @property
    def graphable(self) -> bool:
        """Whether nothing that was chosen for a GPU looks at it in the middle of a step."""
        return not any(
            OPERATIONS[each.choice.op].reads if each.candidate is None else each.candidate.reads
            for each in self._chosen.values()
        )

    def choose(self, op: Operation[S, F], facts: F) -> S:
        """The callable for ``op`` at a call site with these facts. Equal facts share one. Raises StrictKernelError,
        ConfigError."""
        return cast(S, self._call((op.name, facts, None)))

    @property
    def passed(self) -> tuple[KernelChoice, ...]:
        """Shortcuts over whole decoders that candidates declined, and why; nobody is chosen."""
        return tuple(self._passed)

    def offer(self, op: Operation[S, F], facts: F, *, reported: bool = False) -> S | None:
        """As ``choose``, for a shortcut that a layer can do without: None where there is nobody but the twin.

        ``reported``: why there is nobody is kept for ``passed``.
        """
        key = (op.name, facts, None)
        with self._lock:
            if key not in self._chosen:
                chosen = self._choose(key, optional=True)
                if chosen.candidate is None:
                    if reported and chosen.choice.declined:
                        self._passed.append(replace(chosen.choice, chosen=NOBODY))
                    return None
                self._chosen[key] = chosen
            return cast(S, self._chosen[key].call)

    def warm_ups(self, sizes: Sizes, *, since: int = 0) -> Iterator[WarmUp]:
        """Independent small calls that build every kernel of the call sites so far, without the first ``since`` of
        ``choices``."""
        for key, chosen in list(self._chosen.items())[since:]:
            candidate = chosen.candidate
            if candidate is not None and candidate.warm_up is not None and chosen.site is not None:
                give_way = partial(self._give_way, key, candidate)
                site = f"{key[0]} {key[1].dtype}"
                yield from (
                    WarmUp(f"{site}: {name}", call, give_way, OPERATIONS[key[0]].turn)
                    for name, call in candidate.warm_up(chosen.site, chosen.made, sizes)
                )

    def _call(self, key: Key) -> Any:
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = self._choose(key)
            return self._chosen[key].call

    def _choose(self, key: Key, *, optional: bool = False) -> _Chosen:
        op, facts, before = key
        declined: list[tuple[Candidate[Any], str]] = []
        candidates = OPERATIONS[op].candidates
        names = [candidate.name for candidate in candidates]
        for candidate in candidates if before is None else candidates[names.index(before) + 1 :]:
            if self.device.type not in candidate.devices:
                continue  # no news to anybody
            site = CallSite(op, self.device, facts, self.context, partial(self._call, (op, facts, candidate.name)))
            made = self._try(candidate, site, key)
            if not isinstance(made, Declined):
                choice = KernelChoice(op, facts, candidate.name, _reasons(declined), before)
                return _Chosen(choice, self._guarded(key, candidate, made), site, candidate, made)
            declined.append((candidate, made.reason))
        if not optional:
            self._check_twin(op, declined)
        return _Chosen(KernelChoice(op, facts, TWIN, _reasons(declined), before), self._twin(op))

    def _twin(self, op: str) -> Any:
        """On a GPU the library's product is no makeshift, and lies where others do."""
        empty = self.context.empty
        if op == "linear" and self.device.type == "cuda" and empty is not plainly_empty:
            return partial(linear_into, empty=empty)
        return OPERATIONS[op].twin

    def _try(self, candidate: Candidate[Any], site: CallSite[Any], key: Key) -> Any:
        if (said := self._failed.get((key, candidate.name))) is not None:
            return Declined(f"did not compile: {said}")
        if (reason := candidate.refusal(site)) is not None:
            return Declined(reason)
        return candidate.create(site)

    def _guarded(self, key: Key, candidate: Candidate[Any], made: Any) -> Any:
        if candidate.failure is None:
            return made
        return guarded(made, partial(self._give_way, key, candidate), makes=OPERATIONS[key[0]].makes)

    def _give_way(self, key: Key, candidate: Candidate[Any], error: Exception) -> Any:
        """Who takes over from ``candidate``. Raises ``error`` if it is about something else, StrictKernelError if
        nobody may."""
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
                _log.warning(
                    "kernel %s of %s does not compile here: %s; %s runs instead", candidate.name, key[0], said, chosen
                )
            return self._chosen[key].call

    def _check_twin(self, op: str, declined: list[tuple[Candidate[Any], str]]) -> None:
        """The twin is the last resort: is it allowed here?"""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in _reasons(declined)) or "there is no other candidate"
        if self.context.invariant and OPERATIONS[op].varies:
            raise ConfigError(
                f"No batch-invariant kernel for {op} ({reasons}). Mend what it lacks or drop --batch-invariant."
            )
        if self._strict and not all(each.optional or each.is_off(self.context) for each, _ in declined):
            raise StrictKernelError(
                f"{op} would fall back to its torch twin ({reasons}). Mend that or drop --strict-kernels."
            )


def served(op: Operation[S, F], facts: F, context: KernelContext, device: str = "cuda") -> KernelChoice:
    """Who would serve call sites with these facts on a machine with ``context.card``, as far as facts, card and
    techniques say: nothing is built, and this machine need not have one."""
    site = CallSite(op.name, torch.device(device), facts, context)
    declined: list[tuple[str, str]] = []
    for candidate in op.candidates:
        if device in candidate.devices:
            if (reason := candidate.refusal(site)) is None:
                return KernelChoice(op.name, facts, candidate.name, tuple(declined))
            declined.append((candidate.name, reason))
    return KernelChoice(op.name, facts, TWIN, tuple(declined))


class AssumedKernels(Kernels):
    """A registry of a machine with ``card``, which this one need not be: ``choices`` says who would serve there, as
    ``served`` does; what is chosen are twins. For a decoder whose weights are on the meta device."""

    def __init__(
        self, card: Card, *, techniques: frozenset[str] = DECLARED, disabled: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(torch.device("cuda"), techniques=techniques, disabled=disabled, card=card)

    def _choose(self, key: Key, *, optional: bool = False) -> _Chosen:
        operation = OPERATIONS[key[0]]
        choice = served(operation, key[1], self.context)
        named = (each for each in operation.candidates if each.name == choice.chosen)
        return _Chosen(choice, operation.twin, candidate=next(named, None))


def _reasons(declined: Sequence[tuple[Candidate[Any], str]]) -> tuple[tuple[str, str], ...]:
    return tuple((candidate.name, reason) for candidate, reason in declined)


# --- a call site whose kernel may still prove impossible to build

GiveWay = Callable[[Exception], Any]  # the successor's callable; raises the error itself if there is to be none


class Guarded:
    """Calls a candidate; if its kernel cannot be built, the successor takes this call and every later one.

    A kernel is compiled by its first call, and again by the first call of another specialisation, so the guard stays.
    It costs one Python call (a tenth of a microsecond), touches no tensor, and is not there when what was captured
    is replayed.
    """

    __slots__ = ("_give_way", "_run")

    def __init__(self, run: Any, give_way: GiveWay) -> None:
        self._run = run
        self._give_way = give_way

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._run(*arguments, **named)
        except Exception as error:  # give_way raises it again unless it says that the kernel cannot be built
            self._run = self._give_way(error)
        return self._run(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """Whoever is called now answers for itself."""
        return getattr(self._run, name)


def guarded(run: Any, give_way: GiveWay, *, makes: bool) -> Any:
    """``makes``: ``run`` makes the callable of a layer (from its weights), and what it makes is guarded; None stays
    None."""
    if not makes:
        return Guarded(run, give_way)

    def make(*weights: Any) -> Guarded | None:
        made = run(*weights)
        return None if made is None else Guarded(made, lambda error: give_way(error)(*weights))

    return make
