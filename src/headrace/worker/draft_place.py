"""Where a draft model computes that has a device or a thread of its own: the checks, its type and threads, how many
blocks it has room for.

What lives here: that. What may not: loading it, running it (apart_drafts.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.config import Decision
from headrace.errors import ConfigError, OutOfMemory
from headrace.worker.draft_setup import DraftPlace, DraftSetup
from headrace.worker.host import available_memory
from headrace.worker.memory import GIB, bounds, row_bytes
from headrace.worker.settings import Setup, device_kind, resolve_dtype

_FIELD = "speculative_config.device"
_HOST_SHARE = 0.5  # of available memory that keys and values of drafts may take on a CPU whose target is elsewhere


def place_draft(setup: Setup) -> Setup:
    """With the place of a draft model that was given a device. Raises ConfigError where it cannot be there."""
    settings, draft = setup.speculative, setup.draft
    if settings is None or settings.device is None or draft is None:
        return setup
    kind, own = _kind(settings.device), setup.device.type
    _check_alone(setup, elsewhere=kind != own)
    if kind == own == "cuda":
        said = Decision("draft device", kind, "the target's own: its steps are queued beside the target's")
        return replace(setup, decisions=(*setup.decisions, said))
    if kind == own:
        return _threaded(setup, draft)
    dtype, why = resolve_dtype(setup.config.model.dtype, draft.spec.checkpoint_dtype, kind)
    place = DraftPlace(torch.device(kind), dtype, setup.threads, elsewhere=True)
    said = Decision("draft device", kind, f"asked for, the target computes on {own}; in {why.value}, {why.reason}")
    return replace(setup, draft=replace(draft, place=place), decisions=(*setup.decisions, said))


def _kind(asked: str) -> str:
    try:
        return device_kind(asked)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--device", _FIELD, 1)) from error


def _check_alone(setup: Setup, *, elsewhere: bool) -> None:
    device = setup.config.device
    if device.num_devices > 1:
        raise ConfigError(
            f"{_FIELD} is for a target on one device, but this one has {device.num_devices} ranks, which draft beside it; leave it out."
        )
    if elsewhere and device.enable_sleep_mode:
        raise ConfigError(
            f"{_FIELD} puts the draft where --enable-sleep-mode does not reach it; leave out one of the two."
        )


def _threaded(setup: Setup, draft: DraftSetup) -> Setup:
    """Beside a target on the same CPU: its threads are divided, as the two read weights."""
    theirs, drafts = count_read(setup)
    threads = min(max(1, round(setup.threads * drafts / (theirs + drafts))), max(1, setup.threads - 1))
    rest = max(1, setup.threads - threads)
    torch.set_num_threads(rest)
    place = DraftPlace(setup.device, setup.dtype, threads, elsewhere=False)
    said = Decision(
        "draft device", "cpu", f"a thread of its own: {threads} of {setup.threads} threads draft, {rest} verify"
    )
    return replace(setup, draft=replace(draft, place=place), threads=rest, decisions=(*setup.decisions, said))


def count_read(setup: Setup) -> tuple[int, int]:
    """Bytes of weights that a step of the target reads, and drafts for it."""
    assert setup.draft is not None and setup.speculative is not None
    size = setup.dtype.itemsize
    target = bounds(setup.spec, setup.config, size)["weights"]
    return target, setup.draft.weight_bytes(size) * setup.speculative.most


def places_elsewhere(setup: Setup, max_model_len: int) -> int:
    """Blocks that the draft's own device has room for, before anything of it is there. Raises OutOfMemory,
    ConfigError."""
    draft, settings = setup.draft, setup.speculative
    assert draft is not None and draft.place is not None and settings is not None
    place, size = draft.place, draft.place.dtype.itemsize
    available = _available(setup, place)
    rows = row_bytes(setup.rows, max_model_len, draft.spec.vocab_size, setup.block_sizes)
    needed = bounds(draft.spec, setup.config, size)
    held = needed["weights"]
    left = available - held - needed["activations"] - rows
    each = sum(spec.bytes_per_block for spec in setup.draft_kv_specs)
    if settings.draft_memory is not None:
        bounded = draft.bounded_blocks(settings.draft_memory, available - held, held, setup.draft_kv_specs)
        left = min(left, bounded * each)
    if left < each:
        raise OutOfMemory(
            f"The draft model {draft.source.name} does not fit where {_FIELD} puts it ({place.device.type}): of {available / GIB:.2f} GiB, its "
            f"weights take {held / GIB:.2f} GiB, its largest step {needed['activations'] / GIB:.2f} GiB and rows {rows / GIB:.2f} GiB. "
            f"Use a smaller draft model, or draft on the other device."
        )
    return left // each


def _available(setup: Setup, place: DraftPlace) -> int:
    if place.device.type == "cpu":
        return int(available_memory() * _HOST_SHARE)
    free, total = torch.cuda.mem_get_info(place.device)
    return min(free, int(total * setup.config.cache.gpu_memory_utilization))
