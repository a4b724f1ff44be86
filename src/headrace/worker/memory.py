"""Where memory goes: weights, activations, rows, and the KV blocks that get a share of what is left.

What lives here: sizes, the split of a KV budget over groups, the longest sequence that fits. What may not: allocating,
loading.

A sequence of L tokens needs ceil(L / block_size) blocks of a full group, and of a sliding one no more than its window
and a few blocks around it. What can be counted exactly is counted, the rest is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headrace.config import CacheConfig, Decision, EngineConfig
from headrace.errors import ConfigError, OutOfMemory
from headrace.layers.basic import Embedding
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseFeedForward
from headrace.layers.wide_copy import TOKENS, copy_bytes, worth
from headrace.lora.layout import Layout
from headrace.parallel.stages import places_for
from headrace.sites import Role, count_bytes, layer_matrices, layer_weights, matrices
from headrace.spec import DecoderSpec, KVGroup, KVSpec
from headrace.worker.rows import FLOAT_COLUMNS, INT_COLUMNS

GIB = 2**30
COPY = "wide_copy"
_CPU_KV_BYTES = 4 * GIB  # unless asked otherwise, and no more than
_CPU_KV_SHARE = 0.25  # of available memory
_CPU_KV_SHARE_ON_REQUEST = 0.5  # where the user's max_model_len needs more than the default
_TRIED = 4  # captures, from which is learnt what all of them take


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How the cache is made."""

    groups: tuple[KVGroup, ...]
    max_model_len: int
    decisions: tuple[Decision, ...]
    reserved: int = 0  # bytes for a draft's keys and values that lie in fewer blocks than the target's
    draft_blocks: int | None = None  # so many; None: as many as the target's

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.groups) + self.reserved


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the device in bytes: what this engine may take of it, and what of that goes to other things than KV, by
    purpose."""

    available: int
    purposes: Mapping[str, int]

    @property
    def left(self) -> int:
        return self.available - sum(self.purposes.values())

    def account(self) -> str:
        """Every purpose with its size, largest first."""
        ordered = sorted(self.purposes.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in ordered if size)


def gpu_share(total: int, others: int, utilization: float) -> int:
    """Bytes that --gpu-memory-utilization leaves to this engine: it bounds what is in use on the card, ``others``
    included."""
    share = int(total * utilization) - others
    if share <= 0:
        raise OutOfMemory(
            f"--gpu-memory-utilization {utilization:g} is {total * utilization / GIB:.2f} of this GPU's {total / GIB:.2f} GiB, but others hold "
            f"{others / GIB:.2f} GiB of it already. Give more than {others / total:.2f}, end what holds it, or use --device cpu."
        )
    return share


def check_weights_fit(room: Room, device: torch.device) -> None:
    """Whether anything is left for KV."""
    if room.left > 0:
        return
    if device.type == "cpu":
        remedy = "Use a smaller model, or try --dtype bfloat16 if this is float32."
    else:
        remedy = (
            "Use a smaller model, raise --gpu-memory-utilization, lower --max-num-batched-tokens, --max-logits-rows or --max-num-seqs, "
            "or use --device cpu."
        )
    raise OutOfMemory(
        f"This model does not fit: of the {room.available / GIB:.2f} GiB of memory that are available, {room.account()} are needed, "
        f"and nothing is left for KV. {remedy}"
    )


def row_bytes(max_rows: int, max_model_len: int, vocab_size: int, block_sizes: Sequence[int]) -> int:
    """What ``Rows`` holds: ids, block tables, parameters and penalty counts, int32 each."""
    tables = sum(-(-max_model_len // size) for size in block_sizes)
    return 4 * max_rows * (max_model_len + tables + len(FLOAT_COLUMNS) + len(INT_COLUMNS) + vocab_size)


def buckets_up_to(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 256, then of 32: padding costs at most an eighth of a large batch."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 32, 32))
    enough = next(size for size in sizes if size >= max_num_seqs)
    return tuple(size for size in sizes if size <= enough)


def buckets_to_try(buckets: Sequence[int]) -> tuple[int, ...]:
    """The largest and some others, evenly spread, largest first. ``buckets`` ascend."""
    count = min(_TRIED, len(buckets))
    return tuple(buckets[len(buckets) - 1 - index * len(buckets) // count] for index in range(count))


def graph_bytes(count: int, taken: Sequence[int]) -> int:
    """What ``count`` captures take, from what those of ``buckets_to_try`` took, one after the other: the first has the
    memory that all share.

    The driver takes memory in pieces, for several of them at once, so the others count by their mean, and one piece on
    top.
    """
    first, *others = taken
    mean = -(-sum(others) // len(others)) if others else 0
    return first + (count - 1) * mean + max(others, default=0)


def bounds(spec: DecoderSpec, config: EngineConfig, dtype_bytes: int, adapters: Layout | None = None) -> dict[str, int]:
    """Bytes of a model and its steps, before anything is loaded. ``config`` is resolved."""
    scheduler = config.scheduler
    tokens = scheduler.max_num_batched_tokens or 1
    logits_rows = min(scheduler.logits_rows, max(scheduler.rows, tokens))
    tokens = max(
        min(scheduler.rows, tokens), -(-tokens // config.device.context_parallel_size)
    )  # on each of these ranks
    return {
        "weights": count_bytes(spec, dtype_bytes) + (0 if adapters is None else adapters.num_bytes),
        "activations": activation_bytes(spec, tokens, logits_rows, dtype_bytes),
    }


def with_copy(
    room: Room, spec: DecoderSpec, config: EngineConfig, kv_specs: Sequence[KVSpec], dtype_bytes: int, *, on_cpu: bool
) -> tuple[Room, Decision | None]:
    """``room`` with a widened copy of matrices in few bits (layers/wide_copy.py), if there is to be one. ``config`` is
    resolved. Without such matrices there is nothing to decide."""
    size, device, cache = copy_bytes(spec, dtype_bytes), config.device, config.cache
    if not size:
        return room, None
    if device.wide_copy is not None:
        taken, why = device.wide_copy, "as asked for"
    elif on_cpu or device.batch_invariant or not device.quantized_gemm:
        taken, why = False, "automatic only on a GPU, with quantized_gemm and without batch_invariant"
    else:
        fixed = cache.kv_cache_memory
        if cache.num_blocks is not None:
            fixed = sum(each.bytes_per_block for each in kv_specs) * cache.num_blocks
        longest = min(config.model.max_model_len or spec.max_positions, TOKENS)
        problem = worth(size, room.left, fixed, config.scheduler.rows * _bytes_for(kv_specs, longest))
        taken, why = problem is None, problem or "many rows are multiplied by it, few by the codes"
    beside = f"{size / GIB:.2f} GiB of the {room.left / GIB:.2f} that are left beside {', '.join(room.purposes)}"
    found = replace(room, purposes={**room.purposes, COPY: size}) if taken else room
    return found, Decision("wide_copy", taken, f"{beside}: {why}")


def with_pool(
    purposes: dict[str, int], spec: DecoderSpec, pooled: Sequence[int], kept: Sequence[int], dtype_bytes: float
) -> dict[str, int]:
    """Where layers lie in another stage's memory, and those of another lie here (Setup)."""
    if not pooled and not kept:
        return purposes
    away, here = pooled[places_for(pooled) :], "another stage's layers"
    saved = purposes["weights"] - layers_bytes(spec, away, dtype_bytes)
    return {**purposes, "weights": saved, here: layers_bytes(spec, kept, dtype_bytes)}


def layers_bytes(spec: DecoderSpec, layers: Sequence[int], dtype_bytes: float) -> int:
    return int(sum(site.num_bytes(dtype_bytes) for layer in layers for site in layer_weights(spec, layer)))


def activation_bytes(spec: DecoderSpec, num_tokens: int, logits_rows: int, dtype_bytes: int) -> int:
    """A bound on what one step holds at once besides weights and KV: one layer's intermediates, and the logits with one
    copy."""
    first = layer_matrices(spec, 0)
    widest = max(site.used * site.inner for site in matrices(spec) if site.role is Role.DOWN)
    per_token = 4 * spec.hidden_size + first[Role.QKV].inner + first[Role.OUTPUT].inner + 3 * widest
    return num_tokens * per_token * dtype_bytes + logits_rows * spec.vocab_size * (dtype_bytes + 2 * 4)


def weight_bytes(decoder: nn.Module) -> int:
    """Bytes a finished decoder holds: parameters and buffers (a tied one once), what linear layers keep in their
    kernels' form, and slots of adapters."""
    tensors: dict[int, Tensor] = {id(t): t for t in (*decoder.parameters(), *decoder.buffers())}
    deltas = (module.delta for module in decoder.modules() if isinstance(module, Linear | Embedding))
    tensors |= {id(t): t for delta in deltas if delta is not None for t in delta.held}
    packed = sum(
        module.weight_bytes
        for module in decoder.modules()
        if isinstance(module, Linear | Embedding | SparseFeedForward)
    )
    return packed + sum(t.numel() * t.element_size() for t in tensors.values())


def held_copy_bytes(decoder: nn.Module) -> int:
    """Bytes of widened copies, which are no part of ``weight_bytes``."""
    return sum(module.copy_bytes for module in decoder.modules() if isinstance(module, Linear))


# --- KV


def blocks_needed(spec: KVSpec, num_tokens: int) -> int:
    """Blocks of one group that one sequence of ``num_tokens`` holds at most, computed a block at a time."""
    whole = -(-num_tokens // spec.block_size)
    return whole if spec.window is None else min(whole, -(-spec.window // spec.block_size) + 3)


def plan_kv(
    specs: Sequence[KVSpec],
    config: EngineConfig,
    room: Room,
    *,
    max_positions: int,
    on_cpu: bool,
    reserved: int = 0,
    adapters: Layout | None = None,
) -> KVPlan:
    """Sizes every group and settles max_model_len. ``config`` is resolved. ``reserved``: bytes of the budget that
    something else gets. ``adapters``: one must fit beside the longest sequence, where they share the first group's
    blocks. Raises ConfigError or OutOfMemory with the numbers and the flags that help."""
    cache, requested_len = config.cache, config.model.max_model_len
    if requested_len is not None and requested_len > max_positions:
        raise ConfigError(
            f"--max-model-len is {requested_len}, but this model has positions for {max_positions} tokens; give at most {max_positions}."
        )
    if cache.num_blocks is not None:
        return _counted_plan(specs, cache.num_blocks, room, max_positions, requested_len, reserved)
    shared = adapters if adapters is not None and adapters.is_shared else None
    beside = 0 if shared is None else shared.largest * specs[0].bytes_per_block
    budget, reason = _budget(
        cache, room, 0 if requested_len is None else _bytes_for(specs, requested_len) + beside, on_cpu=on_cpu
    )
    budget -= reserved
    longest = _longest(specs, budget - beside, max_positions)
    by_share = not on_cpu and cache.kv_cache_memory is None
    max_model_len = _resolve_len(
        specs, budget - beside, longest, requested_len, "--gpu-memory-utilization" if by_share else "--kv-cache-memory"
    )
    tokens = config.scheduler.max_num_batched_tokens or 1
    groups = _split(specs, budget, config.scheduler.rows, tokens, max_model_len, shared)
    decisions = _kv_decision(groups, reason), *_len_decision(max_model_len, max_positions, requested_len, budget)
    return KVPlan(groups, max_model_len, decisions, reserved)


def _counted_plan(
    specs: Sequence[KVSpec], num_blocks: int, room: Room, max_positions: int, requested_len: int | None, reserved: int
) -> KVPlan:
    """The user counted blocks: an experiment; a cache smaller than max_model_len is then allowed (long requests are
    refused)."""
    needed = sum(spec.bytes_per_block for spec in specs) * num_blocks + reserved
    if needed > room.left:
        raise OutOfMemory(
            f"--num-blocks {num_blocks} is {needed / GIB:.2f} GiB of KV, but {_rest(room)}. Lower --num-blocks."
        )
    full = [spec.block_size * num_blocks for spec in specs if spec.window is None]
    max_model_len = requested_len if requested_len is not None else min([max_positions, *full])
    groups = tuple(KVGroup(spec, num_blocks) for spec in specs)
    return KVPlan(groups, max_model_len, _len_decision(max_model_len, max_positions, requested_len, needed), reserved)


def _rest(room: Room) -> str:
    return f"of the {room.available / GIB:.2f} GiB that are available, {room.account()} are needed and {max(0, room.left) / GIB:.2f} GiB left"


def _budget(cache: CacheConfig, room: Room, needed: int, *, on_cpu: bool) -> tuple[int, str]:
    """``needed``: by one sequence of the requested length, for which a CPU gives more than its default share."""
    if cache.kv_cache_memory is not None:
        if cache.kv_cache_memory > room.left:
            raise OutOfMemory(
                f"--kv-cache-memory is {cache.kv_cache_memory / GIB:.2f} GiB, but {_rest(room)}. Lower --kv-cache-memory."
            )
        return cache.kv_cache_memory, "as --kv-cache-memory asks"
    if not on_cpu:
        return (
            room.left,
            f"what --gpu-memory-utilization {cache.gpu_memory_utilization:g} leaves beside {', '.join(room.purposes)}",
        )
    share = min(_CPU_KV_BYTES, int(room.left * _CPU_KV_SHARE))
    if share < needed <= room.left * _CPU_KV_SHARE_ON_REQUEST:
        return needed, "one sequence of the requested length needs it"
    left = f"{_CPU_KV_SHARE:.0%} of the {room.left / GIB:.1f} GiB that are left"
    return share, f"the smaller of {_CPU_KV_BYTES // GIB} GiB and {left}; --kv-cache-memory changes it"


def _bytes_for(specs: Sequence[KVSpec], num_tokens: int) -> int:
    return sum(spec.bytes_per_block * blocks_needed(spec, num_tokens) for spec in specs)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest n from low to high for which ``fits`` (monotone) holds; low - 1 if none."""
    while low <= high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(middle) else (low, middle - 1)
    return high


def _longest(specs: Sequence[KVSpec], budget: int, max_positions: int) -> int:
    return _largest(1, max_positions, lambda length: _bytes_for(specs, length) <= budget)


def _resolve_len(specs: Sequence[KVSpec], budget: int, longest: int, requested_len: int | None, lever: str) -> int:
    if requested_len is None and longest >= 1:
        return longest
    wanted = requested_len or 1
    if wanted > longest:
        advice = f"lower --max-model-len to at most {longest} or " if longest else ""
        raise ConfigError(
            f"One sequence of {wanted} tokens needs {_bytes_for(specs, wanted) / GIB:.3f} GiB of KV cache, but the cache has {budget / GIB:.3f} GiB; "
            f"{advice}raise {lever}{f' to {_bytes_for(specs, wanted)}' if lever == '--kv-cache-memory' else ''}."
        )
    return wanted


def _split(
    specs: Sequence[KVSpec],
    budget: int,
    max_num_seqs: int,
    tokens_a_step: int,
    max_model_len: int,
    adapters: Layout | None = None,
) -> tuple[KVGroup, ...]:
    """Equal numbers of blocks for every group (short sequences use all groups alike), but in each at least what one
    longest sequence needs and at most what all rows together can use; what one group cannot use goes to the others."""
    floors = [blocks_needed(spec, max_model_len) for spec in specs]
    caps = [_most_used(spec, max_num_seqs, tokens_a_step, max_model_len) for spec in specs]
    if adapters is not None:
        floors[0] += adapters.largest
        caps[0] += adapters.largest * adapters.space.slots

    def counts(level: int) -> list[int]:
        return [min(max(level, floor), cap) for floor, cap in zip(floors, caps, strict=True)]

    level = _largest(
        1, max(caps), lambda n: sum(s.bytes_per_block * c for s, c in zip(specs, counts(n), strict=True)) <= budget
    )
    return tuple(KVGroup(spec, count) for spec, count in zip(specs, counts(max(1, level)), strict=True))


def _most_used(spec: KVSpec, max_num_seqs: int, tokens_a_step: int, max_model_len: int) -> int:
    """All rows at their longest; the tokens of one step, wherever they fall, come on top of the windows."""
    in_step = 0 if spec.window is None else -(-tokens_a_step // spec.block_size)
    whole = max_num_seqs * -(-max_model_len // spec.block_size)
    return min(whole, max_num_seqs * blocks_needed(spec, max_model_len) + in_step)


def _kv_decision(groups: Sequence[KVGroup], reason: str) -> Decision:
    blocks = " + ".join(f"{group.num_blocks} blocks of {group.spec.block_size}" for group in groups)
    return Decision("kv_cache", f"{_num_bytes(groups) / GIB:.2f} GiB: {blocks}", reason)


def _num_bytes(groups: Sequence[KVGroup]) -> int:
    return sum(group.spec.bytes_per_block * group.num_blocks for group in groups)


def memory_decision(plan: KVPlan, memory: Mapping[str, int], held: int | None) -> tuple[Decision, ...]:
    """How far a CPU's process grows. ``held``: bytes that it has once loaded, without the pages of most blocks; None or
    0: unknown."""
    if not held:
        return ()
    most = held + plan.num_bytes + memory["activations"]
    reason = (
        "this process now, and when every block was in use once: the cache's pages are taken with its blocks, and kept"
    )
    return (Decision("memory", f"{held / GIB:.2f} GiB, at most {most / GIB:.2f} GiB", reason),)


def _len_decision(
    max_model_len: int, max_positions: int, requested_len: int | None, budget: int
) -> tuple[Decision, ...]:
    if requested_len is not None:
        return ()
    if max_model_len == max_positions:
        return (Decision("max_model_len", max_model_len, "all the positions the model has"),)
    why = f"the model has {max_positions} positions, but {budget / GIB:.2f} GiB of KV cache hold this many tokens of one sequence"
    return (Decision("max_model_len", max_model_len, why),)
