"""Whether a model can draft for another, and how it would lie beside it.

What lives here: finding it, the checks at start. What may not: loading it, running it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.config import Decision, EngineConfig
from headrace.errors import ConfigError, ModelError
from headrace.models import families
from headrace.models.checkpoint import KeyNames, SafetensorsCheckpoint
from headrace.models.draft_head import DraftHead
from headrace.models.draft_source import find_draft
from headrace.models.heads import HeadSpec, head_bytes, read_head, read_predictor
from headrace.models.loader import open_checkpoint
from headrace.models.safetensors_file import read_sharded
from headrace.models.source import ModelSource, WeightFormat, find_model
from headrace.models.weight_rules import names_of
from headrace.sites import count_bytes
from headrace.spec import DecoderSpec, KVGroup, KVSpec, attention_groups, kv_groups
from headrace.speculative.settings import HEADS, read_settings

_FIELD, _METHOD = "speculative_config.model", "speculative_config.method"
_MIB = 2**20
MOST_PENDING = 256  # tokens whose entries a head has yet to write
_LEAST_TOKENS = 256  # that a bounded draft must be able to keep
_ROWS = 4096  # of embeddings that are compared together


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """Where a draft model computes that has a thread of its own. ``threads``: of a CPU; ``elsewhere``: in memory that
    is not the target's."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    elsewhere: bool


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """``groups``: for each of the draft's KV groups the target's group whose block table it uses. ``head``: what goes on
    from the target's hidden states, ``spec`` is then its one layer; None: a model of its own. ``place``: where it
    computes; None: beside the target. ``said``: of its format, where that is not the stored one."""

    source: ModelSource
    spec: DecoderSpec
    groups: tuple[int, ...]
    head: HeadSpec | None = None
    place: DraftPlace | None = None
    said: Decision | None = None

    def weight_bytes(self, dtype_bytes: int) -> int:
        return count_bytes(self.spec, dtype_bytes) if self.head is None else head_bytes(self.head, dtype_bytes)

    def state_bytes(self, tokens: int, rows: int, dtype_bytes: int) -> int:
        """Hidden states that are kept for a head: of a step's tokens, of each row's last one, and what is pending."""
        if self.head is None:
            return 0
        return (tokens * self.head.tapped + (rows + MOST_PENDING) * self.head.carried) * dtype_bytes

    def kv_specs(self, block_size: int, dtype_bytes: int) -> tuple[KVSpec, ...]:
        return kv_groups(self.spec, block_size, dtype_bytes)

    def beside(self, specs: tuple[KVSpec, ...], block_size: int, dtype_bytes: int) -> tuple[KVSpec, ...]:
        """The target's KV groups, each block with what the draft keeps under the same number."""
        own = self.kv_specs(block_size, dtype_bytes)
        more = [
            sum(each.bytes_per_block for each, at in zip(own, self.groups, strict=True) if at == group)
            for group in range(len(specs))
        ]
        return tuple(replace(spec, beside=size) for spec, size in zip(specs, more, strict=True))

    def bounded_blocks(self, bound: float, budget: int, held: int, specs: Sequence[KVSpec]) -> int:
        """Blocks that keys and values of drafts may have. ``bound``: bytes, or a share of what the draft (``held``: its
        weights and hidden states) and all keys and values (``budget``) take. Raises ConfigError where it is of no use."""
        asked = int(bound * (budget + held)) if bound < 1 else int(bound)
        each, size = sum(spec.bytes_per_block for spec in specs), max(spec.block_size for spec in specs)
        least = held + -(-_LEAST_TOKENS // size) * each
        if asked < least:
            raise ConfigError(
                f"speculative_config.draft_memory is {bound:g}{f', {asked} bytes' if bound < 1 else ''}, but the draft's weights and hidden "
                f"states take {held} bytes, and keys and values of {_LEAST_TOKENS} tokens {least - held} more; give at least {least}."
            )
        return (asked - held) // each

    def check_length(self, longest: int) -> None:
        """Raises ConfigError where sequences may be longer than the draft model's."""
        if self.spec.max_positions < longest:
            raise ConfigError(
                f"{_FIELD} {self.source.name} has positions for {self.spec.max_positions} tokens, but sequences may have {longest} here; "
                f"give --max-model-len {self.spec.max_positions}, or another draft model."
            )


def resolve_draft(
    config: EngineConfig, target: ModelSource, spec: DecoderSpec, kind: str, capability: tuple[int, int] | None
) -> DraftSetup | None:
    """The draft model or head that is asked for. ``kind``: the target's device; ``capability``: of the GPU that there
    is. Raises ConfigError or ModelError where it does not fit the target."""
    settings = read_settings(config.scheduler.speculative_config)
    if settings is not None and settings.method == "mtp":
        return _predictor_setup(target, spec)
    if settings is None or settings.model is None:
        return None
    model = replace(config.model, load_format="dummy" if config.model.load_format == "dummy" else "auto")
    said = None
    try:
        if settings.method in HEADS:
            source = find_model(replace(model, model=settings.model, quantization=None))
            return _head_setup(source, settings.method, target, spec)
        fixed = config.device.batch_invariant  # sums of products in FP8 depend on what else is in a batch
        on = capability if (settings.device or kind) == "cuda" and not fixed else None
        source, said = find_draft(model, settings.model, settings.quantization, on)
        _refuse_head(source)
        draft = families.spec_from_config(source.config)
    except ModelError as error:
        raise _named(error) from error
    if draft.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"{_FIELD} {source.name} has a vocabulary of {draft.vocab_size} tokens, but {target.name} has {spec.vocab_size}; "
            f"give a draft model with the target's tokenizer."
        )
    _check_texts(source, target)
    return DraftSetup(source, draft, _groups(draft, spec, source.name), said=said)


def check_tree(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError where accepted branches could not be what they are in a row."""
    settings = read_settings(config.scheduler.speculative_config)
    if settings is None or settings.tree is None:
        return
    if config.device.batch_invariant and device.type != "cpu":
        raise ConfigError(
            "speculative_config.tree is batch-invariant on a CPU alone; leave out tree or --batch-invariant."
        )


def _named(error: ModelError, field: str = _FIELD) -> ModelError:
    return ModelError(f"{field}: {error.message}", param=error.param)


def _refuse_head(source: ModelSource) -> None:
    keys = read_sharded(source.path) if source.weights is WeightFormat.SAFETENSORS else {}
    if "fc.weight" in keys or "model.fc.weight" in keys:
        method = "eagle3" if any(".hidden_norm." in key for key in keys) else "eagle"
        raise ModelError(f"{source.name} is a draft head, no model of its own; give method {method} beside it.")


def _head_setup(source: ModelSource, method: str, target: ModelSource, spec: DecoderSpec) -> DraftSetup:
    stored = source.weights is WeightFormat.SAFETENSORS
    head = read_head(source.config, read_sharded(source.path) if stored else (), method, spec)
    if stored and not head.own_embedding:
        head = replace(
            head, own_embedding=_embeds_otherwise(source, target, names_of(spec.family).words["embedding"][0])
        )
    return DraftSetup(source, head.block, _groups(head.block, spec, source.name), head)


def _predictor_setup(target: ModelSource, spec: DecoderSpec) -> DraftSetup:
    if target.weights is WeightFormat.GGUF:
        raise ConfigError(
            f"{_METHOD} is 'mtp', but {target.name} is a .gguf file; give safetensors, or another method."
        )
    stored = target.weights is WeightFormat.SAFETENSORS
    try:
        head = read_predictor(read_sharded(target.path) if stored else (), spec)
    except ModelError as error:
        raise _named(error, f"{_METHOD} mtp") from error
    return DraftSetup(target, head.block, _groups(head.block, spec, target.name), head)


def _embeds_otherwise(head: ModelSource, target: ModelSource, name: str) -> bool:
    """Whether a head's embedding is no copy of its target's, as far as their types tell: most are, and are not held."""
    if target.weights is not WeightFormat.SAFETENSORS:
        return False
    own, theirs = SafetensorsCheckpoint(head.path), SafetensorsCheckpoint(target.path)
    try:
        mine, copied = (KeyNames(each.keys()).find(f"{name}.weight") for each in (own, theirs))
        if mine is None or copied is None:
            return False
        if own.shape(mine) != theirs.shape(copied):
            return True
        pairs = zip(own.read(mine).split(_ROWS), theirs.read(copied).split(_ROWS), strict=True)
        return not all(torch.allclose(a.float(), b.float(), rtol=0.01, atol=1e-4) for a, b in pairs)
    finally:
        own.close()
        theirs.close()


def load_head(head: DraftHead, source: ModelSource, dtype: torch.dtype) -> None:
    """Raises ModelError, as resolve_draft does."""
    checkpoint = open_checkpoint(source)
    try:
        head.load(checkpoint, dtype)
    except ModelError as error:
        raise _named(error, _FIELD if head.spec.layout in HEADS else f"{_METHOD} mtp") from error
    finally:
        checkpoint.close()


def draft_memory(
    weights: int,
    states: int,
    caches: Sequence[Tensor],
    groups: Sequence[KVGroup],
    places: int | None = None,
    elsewhere: str | None = None,
) -> Decision:
    """All that a draft model or head holds, allocated at start: a bound that no load exceeds, and what it costs, in
    bytes. ``states``: hidden states that are kept for it; ``groups``: the target's; ``places``: blocks that it has,
    where these are fewer; ``elsewhere``: the device that has it, where the target has another."""
    keys = sum(cache.nbytes for cache in caches)
    plain = sum((group.spec.bytes_per_block - group.spec.beside) * group.num_blocks for group in groups)
    tokens = max(group.num_blocks * group.spec.block_size for group in groups)
    held = weights + keys + states
    more = int(held / plain * tokens)
    hidden = f", {states / _MIB:.1f} MiB of hidden states" if states else ""
    parts = f"{weights / _MIB:.1f} MiB of weights{hidden} and {keys / _MIB:.1f} MiB of keys and values"
    if places is not None:
        bound = "draft_memory bounds it" if elsewhere is None else "there is room"
        parts += f" of {places * groups[0].spec.block_size} tokens, as {bound}: longer or more sequences go without"
    costs = f"the target could keep {more} more tokens in it" if elsewhere is None else f"on {elsewhere}"
    reason = f"{parts}, allocated now and never more; {costs}"
    return Decision("draft memory", f"{held / _MIB:.1f} MiB", reason)


def _groups(draft: DecoderSpec, target: DecoderSpec, name: str) -> tuple[int, ...]:
    windows = [window for window, _ in attention_groups(target)]
    own = [window for window, _ in attention_groups(draft)]
    if missing := [window for window in own if window not in windows]:
        sees = "all tokens" if missing[0] is None else f"{missing[0]} tokens back"
        raise ConfigError(
            f"{_FIELD} {name} has layers that see {sees}, but no layer of the target does, so its keys are not kept; give another."
        )
    return tuple(windows.index(window) for window in own)


def _check_texts(draft: ModelSource, target: ModelSource) -> None:
    """Equal ids must be equal texts; a model without a tokenizer is taken at its word."""
    own, wanted = draft.tokenizer_files(), target.tokenizer_files()
    if own is None or wanted is None:
        return
    if own.tokenizer_json != wanted.tokenizer_json and _vocabulary(own.tokenizer_json) != _vocabulary(
        wanted.tokenizer_json
    ):
        raise ConfigError(
            f"{_FIELD} {draft.name} has another vocabulary than {target.name}: equal ids are other texts; give a draft of its family."
        )


def _vocabulary(text: str) -> Any:
    content = json.loads(text)
    added = [
        (each.get("id"), each.get("content")) for each in content.get("added_tokens", ()) if isinstance(each, Mapping)
    ]
    return content.get("model", {}).get("vocab"), added
