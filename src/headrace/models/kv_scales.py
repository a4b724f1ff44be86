"""Scales in a checkpoint for keys and values in FP8, one per layer or per KV head.

What lives here: finding, checking and filling in. What may not: what a scale does (kernels/attention/kv_codes.py),
names of families (weight_rules.py).
"""

from __future__ import annotations

import logging

from torch import Tensor

from headrace.errors import ModelError
from headrace.models.checkpoint import Checkpoint
from headrace.models.decoder import Decoder
from headrace.models.loader import KeyNames
from headrace.models.weight_rules import kv_scale_names

_log = logging.getLogger(__name__)


def load_kv_scales(decoder: Decoder, checkpoint: Checkpoint) -> int:
    """Fills in the scales of every layer that has some, and returns how many tensors held them; layers without keep 1.

    If the cache is not in FP8, they are not used, and a message says so. Raises ModelError for an invalid scale, and if
    only some layers have them.
    """
    names = KeyNames(checkpoint.keys())
    found = {}
    for layer, block in enumerate(decoder.blocks):
        held = block.attention.quantized
        targets = (None, None) if held is None else (held.k_scales, held.v_scales)
        for spellings, target in zip(kv_scale_names(decoder.spec, layer), targets, strict=True):
            if (key := next(filter(None, map(names.find, spellings)), None)) is not None:
                found[key] = target
    unused = sum(target is None for target in found.values())
    if unused:
        _log.warning(
            "%d scales for keys and values in FP8 are not used: give --kv-cache-dtype fp8 to store the cache in FP8",
            unused,
        )
        return 0
    if found and len(found) < 2 * decoder.spec.num_layers:
        missing = 2 * decoder.spec.num_layers - len(found)
        raise ModelError(
            f"the checkpoint has {len(found)} scales for keys and values and lacks {missing}. Download it again, or use another cache."
        )
    for key, target in found.items():
        assert target is not None
        _fill(target, checkpoint.read(key), key)
    return len(found)


def _fill(target: Tensor, scale: Tensor, key: str) -> None:
    """``target`` [kv_heads], float32; ``scale``: one element, or as many as ``target``."""
    wide = scale.float().flatten()
    if wide.numel() not in (1, target.numel()):
        raise ModelError(
            f"{key} has {wide.numel()} elements; a scale has one, or one for each of {target.numel()} KV heads. Check config.json."
        )
    if not bool((wide.isfinite() & (wide > 0)).all()):
        bad = next(value for value in wide.tolist() if not 0 < value < float("inf"))
        raise ModelError(
            f"{key} is {bad}, which is not a valid scale. Download the checkpoint again, or give --kv-cache-dtype auto or int8."
        )
    target.copy_(wide.expand(target.shape))
