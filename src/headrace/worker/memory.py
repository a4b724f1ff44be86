"""Where memory goes: weights, activations, rows, and the KV blocks that get a share of what is left.

What lives here: sizes, the split of a KV budget over groups, the longest sequence that fits. What may not: allocating, loading.

A sequence of L tokens needs ceil(L / block_size) blocks of a full group, and of a sliding one no more than its window and a
few blocks around it. What can be counted exactly is counted, the rest is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.config import CacheConfig, Decision
from headrace.errors import ConfigError, OutOfMemory
from headrace.layers.linear import Linear
from headrace.spec import DecoderSpec, KVGroup, KVSpec
from headrace.worker.host import available_memory

GIB = 2**30
_CPU_KV_BYTES = 4 * GIB  # unless asked otherwise, and no more than
_CPU_KV_SHARE = 0.25  # of available memory
_CPU_KV_SHARE_ON_REQUEST = 0.5  # where the user's max_model_len needs more than the default


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How the cache is made."""

    groups: tuple[KVGroup, ...]
    max_model_len: int
    decisions: tuple[Decision, ...]

    @property
    def num_bytes(self) -> int:
        return sum(group.spec.bytes_per_block * group.num_blocks for group in self.groups)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the device in bytes: what it has left, and what of that will go to other things than KV."""

    available: int
    weights: int
    activations: int

    @property
    def left(self) -> int:
        return self.available - self.weights - self.activations


def device_memory(device: torch.device, utilization: float) -> int:
    """Bytes this process may take: on a GPU its share of the whole less what is taken; on a CPU what is available."""
    if device.type != "cuda":
        return available_memory()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))


def check_weights_fit(room: Room, device: torch.device) -> None:
    if room.left <= 0:
        lever = "try --dtype bfloat16 if this is float32" if device.type == "cpu" else "raise --gpu-memory-utilization"
        raise OutOfMemory(
            f"The weights take {room.weights / GIB:.2f} GiB and a step about {room.activations / GIB:.2f} GiB, "
            f"but only {room.available / GIB:.2f} GiB of memory are available. Use a smaller model, or {lever}."
        )


def activation_bytes(spec: DecoderSpec, num_tokens: int, logits_rows: int, dtype_bytes: int) -> int:
    """A bound on what one step holds at once besides weights and KV: one layer's intermediates, and the logits with one copy."""
    widest = max(layer.moe.top_k * layer.moe.intermediate_size if layer.moe else spec.intermediate_size for layer in spec.layers)
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    per_token = 4 * spec.hidden_size + heads * spec.head_dim + 3 * widest
    return num_tokens * per_token * dtype_bytes + logits_rows * spec.vocab_size * (dtype_bytes + 2 * 4)


def weight_bytes(decoder: nn.Module) -> int:
    """Bytes a finished decoder holds: parameters and buffers (a tied one once), and what linear layers keep in their kernels' form."""
    tensors: dict[int, Tensor] = {id(t): t for t in (*decoder.parameters(), *decoder.buffers())}
    packed = sum(module.weight_bytes for module in decoder.modules() if isinstance(module, Linear))
    return packed + sum(t.numel() * t.element_size() for t in tensors.values())


# --- KV


def blocks_needed(spec: KVSpec, num_tokens: int) -> int:
    """Blocks of one group that one sequence of ``num_tokens`` holds at most, computed a block at a time."""
    whole = -(-num_tokens // spec.block_size)
    return whole if spec.window is None else min(whole, -(-spec.window // spec.block_size) + 3)


def plan_kv(
    specs: Sequence[KVSpec],
    cache: CacheConfig,
    room: Room,
    *,
    on_cpu: bool,
    max_num_seqs: int,
    tokens_a_step: int,
    max_positions: int,
    requested_len: int | None,
) -> KVPlan:
    """Sizes every group and settles max_model_len. Raises ConfigError or OutOfMemory with the numbers and the flags that help."""
    if requested_len is not None and requested_len > max_positions:
        raise ConfigError(
            f"--max-model-len is {requested_len}, but this model has positions for {max_positions} tokens; give at most {max_positions}."
        )
    if cache.num_blocks is not None:
        return _counted_plan(specs, cache.num_blocks, max_positions, requested_len)
    budget, reason = _budget(cache, room, on_cpu=on_cpu)
    if requested_len is not None and cache.kv_cache_memory is None and on_cpu:
        budget, reason = _stretched(specs, budget, reason, requested_len, room)
    longest = _longest(specs, budget, max_positions)
    max_model_len = _resolve_len(specs, budget, longest, requested_len)
    groups = _split(specs, budget, max_num_seqs, tokens_a_step, max_model_len)
    plan = KVPlan(groups, max_model_len, ())
    return KVPlan(groups, max_model_len, (_kv_decision(plan, reason), *_len_decision(max_model_len, max_positions, requested_len, budget)))


def _counted_plan(specs: Sequence[KVSpec], num_blocks: int, max_positions: int, requested_len: int | None) -> KVPlan:
    """The user counted blocks: an experiment; a cache smaller than max_model_len is then allowed (long requests are refused)."""
    full = [spec.block_size * num_blocks for spec in specs if spec.window is None]
    max_model_len = requested_len if requested_len is not None else min([max_positions, *full])
    groups = tuple(KVGroup(spec, num_blocks) for spec in specs)
    return KVPlan(groups, max_model_len, _len_decision(max_model_len, max_positions, requested_len, KVPlan(groups, max_model_len, ()).num_bytes))


def _budget(cache: CacheConfig, room: Room, *, on_cpu: bool) -> tuple[int, str]:
    if cache.kv_cache_memory is not None:
        if cache.kv_cache_memory > room.left:
            raise OutOfMemory(
                f"--kv-cache-memory is {cache.kv_cache_memory / GIB:.2f} GiB, but beside weights ({room.weights / GIB:.2f} GiB) and activations "
                f"({room.activations / GIB:.2f} GiB) only {max(0, room.left) / GIB:.2f} GiB are available. Lower --kv-cache-memory."
            )
        return cache.kv_cache_memory, "as --kv-cache-memory asks"
    if not on_cpu:
        return room.left, f"what --gpu-memory-utilization {cache.gpu_memory_utilization:g} leaves beside weights and activations"
    share = min(_CPU_KV_BYTES, int(room.left * _CPU_KV_SHARE))
    left = f"{_CPU_KV_SHARE:.0%} of the {room.left / GIB:.1f} GiB that are left"
    return share, f"the smaller of {_CPU_KV_BYTES // GIB} GiB and {left}; --kv-cache-memory changes it"


def _stretched(specs: Sequence[KVSpec], budget: int, reason: str, requested_len: int, room: Room) -> tuple[int, str]:
    """More than the default share, where one sequence of the requested length needs it."""
    needed = _bytes_for(specs, requested_len)
    if budget < needed <= room.left * _CPU_KV_SHARE_ON_REQUEST:
        return needed, f"one sequence of the requested {requested_len} tokens needs it"
    return budget, reason


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


def _resolve_len(specs: Sequence[KVSpec], budget: int, longest: int, requested_len: int | None) -> int:
    if requested_len is None and longest >= 1:
        return longest
    wanted = requested_len or 1
    if wanted > longest:
        advice = f"lower --max-model-len to at most {longest} or " if longest else ""
        raise ConfigError(
            f"One sequence of {wanted} tokens needs {_bytes_for(specs, wanted) / GIB:.3f} GiB of KV cache, but the cache has {budget / GIB:.3f} GiB; "
            f"{advice}raise --kv-cache-memory to {_bytes_for(specs, wanted)}."
        )
    return wanted


def _split(specs: Sequence[KVSpec], budget: int, max_num_seqs: int, tokens_a_step: int, max_model_len: int) -> tuple[KVGroup, ...]:
    """Equal numbers of blocks for every group (short sequences use all groups alike), but in each at least what one longest
    sequence needs and at most what all rows together can use; what one group cannot use goes to the others."""
    floors = [blocks_needed(spec, max_model_len) for spec in specs]
    caps = [_most_used(spec, max_num_seqs, tokens_a_step, max_model_len) for spec in specs]

    def counts(level: int) -> list[int]:
        return [min(max(level, floor), cap) for floor, cap in zip(floors, caps, strict=True)]

    level = _largest(1, max(caps), lambda n: sum(s.bytes_per_block * c for s, c in zip(specs, counts(n), strict=True)) <= budget)
    return tuple(KVGroup(spec, count) for spec, count in zip(specs, counts(max(1, level)), strict=True))


def _most_used(spec: KVSpec, max_num_seqs: int, tokens_a_step: int, max_model_len: int) -> int:
    """All rows at their longest; the tokens of one step, wherever they fall, come on top of the windows."""
    in_step = 0 if spec.window is None else -(-tokens_a_step // spec.block_size)
    whole = max_num_seqs * -(-max_model_len // spec.block_size)
    return min(whole, max_num_seqs * blocks_needed(spec, max_model_len) + in_step)


def _kv_decision(plan: KVPlan, reason: str) -> Decision:
    blocks = " + ".join(f"{group.num_blocks} blocks of {group.spec.block_size}" for group in plan.groups)
    return Decision("kv_cache", f"{plan.num_bytes / GIB:.2f} GiB: {blocks}", reason)


def _len_decision(max_model_len: int, max_positions: int, requested_len: int | None, budget: int) -> tuple[Decision, ...]:
    if requested_len is not None:
        return ()
    if max_model_len == max_positions:
        return (Decision("max_model_len", max_model_len, "all the positions the model has"),)
    why = f"the model has {max_positions} positions, but {budget / GIB:.2f} GiB of KV cache hold this many tokens of one sequence"
    return (Decision("max_model_len", max_model_len, why),)
