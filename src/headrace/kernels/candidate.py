"""What a kernel candidate is: a name, where it runs, and how it accepts or declines a call site.

What lives here: the nouns the registry and the candidates share. What may not: kernels, choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from headrace.kernels.linear.packing import Coding
from headrace.kernels.rows.reference import plainly_empty as plainly_empty
from headrace.kernels.rows.reference import rows_of as rows_of
from headrace.spec import DecoderSpec, KVFormat

# memory for a result; its first dimension counts rows of the step
Empty = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32,)


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for every call from one place; equal facts share one choice."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class NormFacts(Facts):
    """``early``: of up to so many rows the GEMM behind it asks for its weights before its inputs are there."""

    weight_dtype: torch.dtype
    early: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [outs, ins] as a product sees it; ``gated``: it holds two such matrices, one behind the other."""

    outs: int
    ins: int
    gated: bool = False

    @property
    def key(self) -> str:
        """Its name in files of what was measured."""
        return f"{self.outs} x {self.ins}{', gated' if self.gated else ''}"

    @classmethod
    def of_key(cls, key: str) -> Shape:
        """Raises ValueError."""
        size, _, gated = key.partition(", ")
        outs, ins = map(int, size.split(" x "))
        return cls(outs, ins, gated == "gated")


@dataclass(frozen=True, slots=True)
class EightBits:
    """Inputs and weights both in 8 bits: "fp8" or "int8". ``group``: inputs of one scale, 128, and then weights have
    one a block of 128 by 128; 0: inputs have one a row, weights one an output. ``static``: inputs have a stored one."""

    kind: str
    group: int = 0
    powers: bool = False
    static: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.kind == "int8" else torch.float8_e4m3fn

    @property
    def kind_of(self) -> str:
        """With blocks as a kind of their own."""
        return "blocks" if self.group else self.kind


@dataclass(frozen=True, slots=True)
class WeightFacts(Facts):
    """``gated``: the columns are those of a gate and of what it gates. ``shared``: the weight is another layer's, too.
    ``fused``: few rows go through ``fused_linear``. ``routes``: to experts. ``formats``: of its parts, where they have
    some; ``codings`` and ``eights``: what kernels may take these for, each. ``parts``: outputs of each, where codings
    differ."""

    in_features: int
    out_features: int
    gated: bool = False
    shared: bool = False
    fused: bool = False
    routes: bool = False
    formats: tuple[str, ...] = ()
    codings: tuple[Coding | None, ...] = ()
    eights: tuple[EightBits | None, ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        return Shape(self.out_features // (2 if self.gated else 1), self.in_features, self.gated)

    @property
    def laid(self) -> Shape:
        """A gate as one matrix."""
        return Shape(self.out_features, self.in_features)


@dataclass(frozen=True, slots=True)
class DeltaFacts(Facts):
    """``parts``: outputs of what is merged in the weight. ``rank``: the largest. ``chunk``: elements of a row of a, or a
    column of b, that lie side by side."""

    in_features: int
    parts: tuple[int, ...]
    rank: int
    chunk: int

    @property
    def chunks(self) -> tuple[int, int]:
        """Of a row of a, and of a column of b."""
        return -(-self.in_features // self.chunk), -(-max(self.parts) // self.chunk)


@dataclass(frozen=True, slots=True)
class HeadFacts(Facts):
    """``kv``: how the cache holds keys and values; None: in ``dtype``. ``ranks``: share the keys, and where there are
    several, calls want the log-sum-exp, too."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    kv: KVFormat | None = field(default=None, kw_only=True)
    ranks: int = field(default=1, kw_only=True)

    def ungrouped(self, most: int) -> str | None:
        """Why its query heads are no groups of up to so many."""
        if self.num_heads % self.num_kv_heads or self.num_heads // self.num_kv_heads > most:
            return f"{self.num_heads} heads over {self.num_kv_heads} KV heads are no group of 1 to {most}"
        return None


@dataclass(frozen=True, slots=True)
class RopeFacts(HeadFacts):
    """``normed``: of the weights of norms of heads, between the product and the rotation; None: there are none.
    ``early``: of up to so many rows, that product lets what is behind it in before it has ended."""

    rotary_dim: int
    normed: torch.dtype | None
    window: int | None
    soft_cap: float | None
    early: int = 0


@dataclass(frozen=True, slots=True)
class ExpertFacts(Facts):
    """``held``: how many of the experts this rank has, where each has whole ones; None: all are here."""

    num_experts: int
    top_k: int
    formats: tuple[str, ...] = ()
    codings: tuple[Coding | None, ...] = ()
    eights: tuple[EightBits | None, ...] = ()
    rounded: tuple[Coding | None, ...] = ()  # codings where inputs may have to be rounded by row first
    held: int | None = None


@dataclass(frozen=True, slots=True)
class StepFacts(Facts):
    """``eight``: what all weights of layers are in, where they are no plain ones."""

    spec: DecoderSpec
    kv: KVFormat | None = None
    eight: EightBits | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """A candidate does not serve a call site; ``reason`` is printed by ``headrace doctor``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, as far as candidates and kernels are chosen by it. ``processors``: its streaming multiprocessors."""

    name: str
    capability: tuple[int, int]
    processors: int

    @classmethod
    def of(cls, device: torch.device) -> Card | None:
        """None where torch finds none, or ``device`` is another kind."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return None
        facts = torch.cuda.get_device_properties(device)
        return cls(facts.name, (facts.major, facts.minor), facts.multi_processor_count)


@dataclass(frozen=True, slots=True)
class KernelContext:
    """What holds for all call sites of an engine. ``techniques``: those in use (techniques/), by name; ``disabled``:
    candidates never to choose; ``empty``: where results of many rows get their memory."""

    card: Card | None = None
    techniques: frozenset[str] = frozenset()
    disabled: frozenset[str] = frozenset()
    empty: Empty = plainly_empty

    @property
    def invariant(self) -> bool:
        """Whether the bits of a row may not depend on the others: only kernels that do not vary are chosen."""
        return "batch_invariant" in self.techniques


def _unknown() -> object:
    raise LookupError("this call site was not made by the registry, which alone knows who stands behind a candidate")


F = TypeVar("F", bound=Facts)
_FIRST_PDL = (9, 0)


@dataclass(frozen=True, slots=True)
class CallSite(Generic[F]):
    """A call site as the registry describes it to candidates. ``facts`` are static: they hold for every call from
    there. ``behind``: what the candidates after this one, or the twin, make of the same call site, for one that serves
    a part of what comes from there; who asks has accepted.
    """

    op: str
    device: torch.device
    facts: F
    context: KernelContext = KernelContext()
    behind: Callable[[], Any] = _unknown

    @property
    def empty(self) -> Empty:
        return self.context.empty

    @property
    def invariant(self) -> bool:
        return self.context.invariant

    @property
    def card(self) -> Card:
        assert self.context.card is not None, "only candidates of a GPU ask"
        return self.context.card

    @property
    def pdl(self) -> bool:
        """Programmatic dependent launch: whether a kernel may be launched while the one before still runs, and waits
        for it itself. Where bits count, one kernel serves all batches."""
        card = self.context.card
        in_use = "programmatic_launch" in self.context.techniques
        return in_use and not self.invariant and card is not None and card.capability >= _FIRST_PDL

    def uses(self, technique: str) -> bool:
        return technique in self.context.techniques

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An input for a warm-up."""
        return torch.zeros(shape, dtype=dtype or self.facts.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the call sites of one model will be given, as far as kernels are compiled for it. Sizes in tokens."""

    spec: DecoderSpec
    dtype: torch.dtype
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


Calls = Iterable[tuple[str, Callable[[], object]]]


@dataclass(frozen=True, slots=True)
class Candidate(Generic[F]):
    """One way to carry out an operation. ``create`` returns a callable with the twin's signature, or why not.

    ``techniques``: it is never chosen while one of them is not in use. ``least``: the compute capability of a GPU that
    it needs; with ``alone`` it serves that one only. ``refuses``: what it does not serve, found without looking at the
    device. ``varies``: the bits of a row depend on the other rows. ``reads``: a call looks at a GPU, which no
    capture can hold. ``optional``: where it declines, what stands behind it is as good or the twin serves: that is no
    fallback, and ``--strict-kernels`` does not mind. ``failure``: the reason, if an exception out of a call means that
    its kernel cannot be built or loaded on this device (and nothing was computed); None for every other exception.
    Without it every exception is the caller's. ``warm_up``: calls over small inputs, independent of each other, that
    together build every kernel the site will need. Their names say which: of one name for one operation and element
    type, one is enough, whichever site it is from.
    """

    name: str
    create: Callable[[CallSite[F]], Any]
    devices: tuple[str, ...] = ("cpu",)  # torch device types
    dtypes: tuple[torch.dtype, ...] = FLOATS
    techniques: frozenset[str] = frozenset()
    least: tuple[int, int] = (0, 0)
    alone: bool = False
    refuses: Callable[[CallSite[F]], str | None] | None = None
    varies: bool = False
    reads: bool = False
    optional: bool = False
    failure: Callable[[Exception], str | None] | None = None
    warm_up: Callable[[CallSite[F], Any, Sizes], Calls] | None = None

    def is_off(self, context: KernelContext) -> bool:
        return self.name in context.disabled or not self.techniques <= context.techniques

    def refusal(self, site: CallSite[F]) -> str | None:
        """Why it does not serve a call site, as far as that is known without building anything."""
        if self.is_off(site.context):
            return "disabled by configuration"
        if self.varies and site.invariant:
            return "its sums depend on what else is in the batch"
        if site.facts.dtype not in self.dtypes:
            taken = ", ".join(str(each).removeprefix("torch.") for each in self.dtypes)
            return f"element type {site.facts.dtype} is none of {taken}"
        return self._beyond(site.context.card) or (None if self.refuses is None else self.refuses(site))

    def _beyond(self, card: Card | None) -> str | None:
        if self.least == (0, 0):
            return None
        if card is None:
            return "torch finds no CUDA device"
        if card.capability == self.least or (card.capability > self.least and not self.alone):
            return None
        return "compute capability {}.{} is {} {}.{}".format(
            *card.capability, "not" if self.alone else "below", *self.least
        )
