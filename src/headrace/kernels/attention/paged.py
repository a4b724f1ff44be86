"""Attention over paged keys and values, for any mix of query lengths.

What lives here: which kernel computes which sequences, how large its tiles are, which variants of the kernels a model
needs. What may not: the kernels (triton_prefill.py, triton_decode.py).

    query length    1 … FEW              more                      FEW: as many as fit, with a KV head's group, into one
    16-row
    kernel          decode, split KV     prefill, whole rows            matrix instruction

On Hopper kernels in CUDA C++ may stand in for prefill (kernels/attention/cuda_prefill.py) and, where sequences of one
query come first and the others have many, for decode (kernels/attention/cuda_rope.py).

Both read lengths on the device alone; sequences of the other kind are passed over. With ``invariant`` every
sequence goes through the prefill kernel in one configuration: its tiles lie at absolute multiples, so a row's bits
depend on nothing but its own keys.

What a kernel is compiled for is known from the model alone: nothing that follows the batch is a constant of a kernel,
or specialised on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.kernels.attention import triton_decode as decode
from headrace.kernels.attention import triton_plan as plan
from headrace.kernels.attention import triton_prefill as prefill
from headrace.kernels.attention import triton_tree as tree
from headrace.kernels.attention.candidates import create_singles
from headrace.kernels.attention.cuda_prefill import Prompts, why_not
from headrace.kernels.attention.triton_cascade import Common, make_common
from headrace.kernels.attention.triton_sharing import FEWEST, LEAST_SAVED
from headrace.kernels.attention.triton_widen import LEAST_QUERIES, WidePrompts
from headrace.kernels.build.later import Later
from headrace.kernels.build.launch import Aim, aiming, can_come_later
from headrace.kernels.candidate import CallSite, Declined, Empty, HeadFacts, plainly_empty
from headrace.kernels.inputs import AttentionInputs, Quantized
from headrace.spec import KVFormat

if TYPE_CHECKING:
    from headrace.kernels.attention.cuda_rope import Singles

_MOST_PROGRAMS = 3  # of the decode kernel, a processor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of one kernel, found by measurement on an H200. ``rows`` are queries × heads of a group, ``keys`` are read
    at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1  # of the decode kernel, a processor
    common: int = 64  # keys of many sequences, read at once by the decode kernel
    # keys that the prefill kernel absorbs by themselves, 0 for all: then results are the same whoever computed a part
    part: int = 0
    # the prefill kernel's addresses in uniform registers: slower by 8 % for 8 warps and long prompts
    uniform: bool = False


def prefill_tiles(dtype: torch.dtype, head_dim: int, group: int, bulk: int) -> Tiles:
    """``bulk``: how many keys the copy engine may bring at once, 0 if it may not."""
    if dtype is torch.float32:
        return Tiles(_rows(group), 16, 4, 2)
    if head_dim > 128:
        return Tiles(128, 32, 8, 2)
    if bulk >= 64:
        return Tiles(128, 64, 4, 5 if head_dim <= 64 else 4, uniform=True)
    return Tiles(128, 64, 8, 3)


def invariant_tiles(dtype: torch.dtype, head_dim: int, group: int, bulk: int) -> Tiles:
    """For any query length: as few rows as wgmma takes, since a sequence that decodes fills no more than a group of
    them."""
    if dtype is torch.float32 or head_dim > 128:
        return prefill_tiles(dtype, head_dim, group, bulk)
    return Tiles(64, 64, 4, 4 if bulk >= 64 else 3, part=1024, uniform=True)


def decode_tiles(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, *, many: bool, sharing: bool = False
) -> Tiles:
    """``many``: as many sequences as may share keys; ``sharing``: they do."""
    rows = _rows(group)
    if dtype is torch.float32:
        return Tiles(rows, 16, 4, 2, 2)
    if head_dim > 128 or rows > 16:
        return Tiles(rows, 32, 4, 3, 3)
    if block_size % 128 or (many and head_dim > 64 and not sharing):
        return Tiles(rows, 64, 4, 5, 2)
    return Tiles(rows, 128, 4, 3 if head_dim > 64 or not many else 5, 2)


def _rows(group: int) -> int:
    """As few as a matrix instruction takes."""
    return max(16, 1 << (group - 1).bit_length())


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """out = softmax(scale · q kᵀ, capped, masked) v (FlashAttention, Dao et al. 2022; PagedAttention, Kwon et al.
    2023).

    ``q`` [T, Hq, D]; caches [blocks, Hk, block_size, D] in the type of q, with any strides; returns [T, Hq, D], tokens
    of no sequence zero. Query i of a sequence with Lq queries and context length Lc sits at Lc − Lq + i and sees the
    keys up to its own, the last ``window`` of them; scores s become soft_cap · tanh(s / soft_cap). Nothing beyond a
    sequence's length or behind its window is used. ``processors`` of the device. ``bulk``: it has a copy engine
    (compute capability 9), which brings keys and values to the prefill kernel wherever blocks are as large as tiles:
    from 64 tokens, better 128. ``cascade``: what decoding sequences begin with in common is read once for many
    (triton_cascade.py). ``unified``: the decode kernel looks for no highest score where it need not (triton_decode.py);
    not for float16. ``prompts``: attends to sequences of many queries where there is no window and no cap, and keys and
    values lie as it wants; ``singles``: to those of one query beside them. ``kv``: calls come with ``quantized`` caches
    of that format, uint8 (kv_codes.py). ``lse``: calls want the log-sum-exp, too,
    and there are no ``singles``. Tokens of trees are computed again, by what they see (triton_tree.py). Calls of one object must
    follow each other on the device.
    """

    head_dim: int
    group: int
    processors: int
    invariant: bool
    bulk: bool = False
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"
    cascade: bool = False
    unified: bool = False
    prompts: Prompts | WidePrompts | None = None
    singles: Singles | None = None
    kv: KVFormat | None = None
    empty: Empty = plainly_empty
    lse: bool = False
    # the last, by window
    _plans: dict[int | None, tuple[AttentionInputs, plan.Plan]] = field(init=False, repr=False, compare=False)
    _scratch: decode.Scratch = field(init=False, repr=False, compare=False)
    _ticket: Tensor | None = field(init=False, repr=False, compare=False)
    _common: Common | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        programs = _MOST_PROGRAMS * self.processors
        object.__setattr__(
            self, "_scratch", decode.make_scratch(programs, _rows(self.group), self.head_dim, self.device)
        )
        object.__setattr__(self, "_plans", {})
        cascade = self.cascade and not self.invariant and self.dtype is not torch.float32
        object.__setattr__(self, "_ticket", torch.zeros(1, dtype=torch.int32, device=self.device) if cascade else None)
        object.__setattr__(self, "_common", make_common(programs, self.head_dim, self.device) if cascade else None)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        quantized: Quantized | None = None,
        lse: Tensor | None = None,  # [T, Hq], float32, written
    ) -> Tensor:
        q = q if q.stride(2) == 1 else q.contiguous()
        out = self.empty(q.shape, q.dtype, q.device)
        if q.shape[0] == 0:
            return out
        call = prefill.Attended(q, out, k_cache, v_cache, inputs, scale, window, soft_cap, quantized, lse)
        few = 0 if self.invariant else _rows(self.group) // self.group
        longest, sequences = inputs.max_query_len, inputs.context_len.shape[0]
        if longest > few or q.shape[0] != sequences * longest:
            if sequences == 1 and longest > few:
                few = 0  # one prompt: no second kernel
            self._attend_many(call, few)
        singles = self._for_singles(inputs, window, soft_cap)
        if few and not (singles is not None and singles.attend(q, out, k_cache, v_cache, inputs, scale, quantized)):
            sharing = plan.cascades(inputs, window, self.group, self._ticket)
            sizes = q.dtype, self.head_dim, self.group, inputs.block_size
            small = decode_tiles(*sizes, many=sequences >= FEWEST, sharing=sharing)
            unified = self.unified and q.dtype is not torch.float16  # which holds no power above 15
            made = self._plan(inputs, window, few, k_cache.shape[1], small)
            decode.attend(call, few, small, made, self._scratch, self._common, unified)
        if inputs.tree is not None:
            tree.attend(call)
        return out

    def _for_singles(self, inputs: AttentionInputs, window: int | None, soft_cap: float | None) -> Singles | None:
        """Who attends to the first sequences of a step, if they are known to be single queries before prompts."""
        if (
            not inputs.leading
            or window is not None
            or soft_cap is not None
            or plan.cascades(inputs, window, self.group, self._ticket, codes=self._codes)
        ):
            return None
        return self.singles

    def _attend_many(self, call: prefill.Attended, few: int) -> None:
        prompts = self._for_prompts(call)
        if prompts is not None and prompts.attend(*call[:6], few, call.lse, call.quantized):
            return
        room = prefill.bulk_keys(call.k_cache, call.v_cache) if self.bulk and call.quantized is None else 0
        large = (invariant_tiles if self.invariant else prefill_tiles)(call.q.dtype, self.head_dim, self.group, room)
        bulk, tickets = room >= large.keys, self._scratch.tickets
        prefill.attend(call, few, large, bulk, self.processors, tickets)

    def _for_prompts(self, call: prefill.Attended) -> Prompts | WidePrompts | None:
        return None if call.window is not None or call.soft_cap is not None else self.prompts

    def _plan(self, inputs: AttentionInputs, window: int | None, few: int, kv_heads: int, tiles: Tiles) -> plan.Plan:
        """Made by the first layer of a step; the others bring the same inputs."""
        known = self._plans.get(window)
        if known is None or known[0] is not inputs:
            programs = tiles.programs * self.processors
            known = self._plans[window] = (
                inputs,
                plan.make_plan(inputs, window, few, programs, self.group, kv_heads, tiles, self._ticket),
            )
        return known[1]

    def least_shared(self, rows: int) -> int | None:
        """From how many shared tokens on so many decoding sequences are looked at for keys that they share; None: they
        never are."""
        shared = self._ticket is not None and plan.may_group(rows, self.group)
        return plan.least_saved(rows, codes=self._codes) if shared else None

    @property
    def _codes(self) -> bool:
        """Whether the kernel in CUDA C++ reads codes here, where sequences share nothing."""
        return self.kv is not None and self.singles is not None

    def warm_up(
        self, q_heads: int, block_size: int, windows: Sequence[int | None], soft_cap: float | None
    ) -> list[Callable[[], object]]:
        """One call for each variant of a kernel that a model with these layers can ever need; each launches it over a
        few tokens of its own.

        They share nothing, so threads may make them at once. Those that take longest to compile come first; those for
        keys that sequences share, which steps can do without, may come later. ``windows`` of all layers; how many
        sequences a step has makes no difference.
        """
        kinds = {window is not None: window for window in windows}.values()
        singles = (
            []
            if self.singles is None or soft_cap is not None or all(windows)
            else [partial(self.singles.warm_up, block_size)]
        )
        return singles + [
            self._waits(call) if case.sharing else partial(call, self.device)
            for case in self._cases(block_size)
            for window in kinds
            if not (case.sharing and window is not None)
            for call in (partial(self._warmed_up, q_heads, block_size, window, soft_cap, case),)
        ]

    def _cases(self, block_size: int) -> list[_Case]:
        """Many sequences that share no keys are computed in tiles of their own."""
        long = _Case(1, _rows(self.group) // self.group + 1)
        if self.invariant:
            return [long]
        wide = [_Case(1, LEAST_QUERIES)] if isinstance(self.prompts, WidePrompts) else []
        few, many = (
            decode_tiles(self.dtype, self.head_dim, self.group, block_size, many=each) for each in (False, True)
        )
        shared = (
            [_Case(FEWEST, 1, sharing=True)] if self._ticket is not None and plan.may_group(FEWEST, self.group) else []
        )
        attended = [*shared, *([] if few == many else [_Case(FEWEST, 1)]), _Case(1, 1), *wide, long]
        planned = [*shared, *([] if few.keys == many.keys else [_Case(FEWEST, 1)]), _Case(1, 1)]
        return [*attended, *(replace(each, planned=False) for each in planned)]

    def _waits(self, call: Callable[[torch.device | str], object]) -> Callable[[], object]:
        now = partial(call, self.device)
        return (
            Later(now, partial(_within, Aim.FIND, now), partial(_within, Aim.BUILD, partial(call, "cpu")))
            if can_come_later()
            else now
        )

    def _warmed_up(
        self,
        q_heads: int,
        block_size: int,
        window: int | None,
        soft_cap: float | None,
        case: _Case,
        device: torch.device | str,
    ) -> object:
        """``device``: where its tensors are made."""
        alone = replace(self, device=device)  # with scratch memory of its own
        kv_heads, length, tokens = q_heads // self.group, case.length, case.sequences * case.length
        blocks = -(-length // block_size)
        quantized, row, kind = None, self.head_dim, self.dtype
        if self.kv is not None:
            shared = None if self.kv.scales else torch.ones(kv_heads, device=device)
            quantized, row, kind = Quantized(self.kv, shared, shared), self.kv.token_bytes(self.head_dim), torch.uint8
        cache = torch.zeros((blocks, 1, 2, kv_heads, block_size, row), dtype=kind, device=device)
        q = torch.zeros((tokens, q_heads + 2 * kv_heads, self.head_dim), dtype=self.dtype, device=device)[:, :q_heads]
        starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        contexts = torch.full((case.sequences,), length, dtype=torch.int32, device=device)
        table = torch.arange(blocks, dtype=torch.int32, device=device).repeat(case.sequences, 1)
        slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        inputs = AttentionInputs(
            table, starts, contexts, slots, block_size, length, length, LEAST_SAVED if case.sharing else 0
        )
        few, many = _rows(self.group) // self.group, case.sequences >= FEWEST
        tiles = decode_tiles(self.dtype, self.head_dim, self.group, block_size, many=many, sharing=case.sharing)
        programs = tiles.programs * self.processors
        if not case.planned:
            return plan.make_plan(inputs, window, few, programs, self.group, kv_heads, tiles, alone._ticket)
        alone._plans[window] = inputs, plan.empty_plan(inputs, window, programs, self.group, alone._ticket)
        lse = torch.empty((tokens, q_heads), device=device) if self.lse else None
        return alone(q, cache[:, 0, 0], cache[:, 0, 1], inputs, 1.0, window, soft_cap, quantized, lse)


@dataclass(frozen=True, slots=True)
class _Case:
    """A warmed up step. ``planned``: over an empty plan; else the plan alone is made. ``sharing``: as if sequences
    shared keys."""

    sequences: int
    length: int
    planned: bool = True
    sharing: bool = False


def _within(aim: Aim, call: Callable[[], object]) -> object:
    with aiming(aim):
        return call()


def create_paged_attention(site: CallSite[HeadFacts]) -> PagedAttention:
    dtype, head_dim, unified = site.facts.dtype, site.facts.head_dim, site.uses("unified_maximum")
    capability, processors = site.card.capability, site.card.processors
    bulk, group = capability[0] == 9, site.facts.num_heads // site.facts.num_kv_heads
    kv = site.facts.kv
    wanted = site.uses("cuda_prefill") and not site.invariant and why_not(dtype, head_dim, capability) is None
    prompts: Prompts | WidePrompts | None = None
    if wanted:
        plain = Prompts(head_dim, group, site.device)
        prompts = plain if kv is None else WidePrompts(plain.attend, site.facts.num_kv_heads, head_dim, site.device)
    flags = site.invariant, bulk, dtype, site.device
    singles = None if site.invariant or site.facts.ranks > 1 else create_singles(site)
    more: dict[str, Any] = {
        "prompts": prompts,
        "singles": singles,
        "kv": kv,
        "empty": site.empty,
        "lse": site.facts.ranks > 1,
    }
    return PagedAttention(head_dim, group, processors, *flags, unified=unified, **more)


def create_cascade_attention(site: CallSite[HeadFacts]) -> PagedAttention | Declined:
    if site.facts.ranks > 1:
        return Declined("ranks share the keys, and its parts' sums are not kept")
    return replace(create_paged_attention(site), cascade=True)
