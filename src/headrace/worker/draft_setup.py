"""Whether a model can draft for another, and how it would lie beside it.

What lives here: finding it, the checks at start. What may not: loading it, running it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from headrace.config import Decision, EngineConfig
from headrace.errors import ConfigError, ModelError
from headrace.models import families
from headrace.models.source import ModelSource, find_model
from headrace.sites import count_bytes
from headrace.spec import DecoderSpec, KVGroup, KVSpec, attention_groups, kv_groups
from headrace.speculative.settings import read_settings

_FIELD = "speculative_config.model"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """``groups``: for each of the draft's KV groups the target's group whose block table it uses."""

    source: ModelSource
    spec: DecoderSpec
    groups: tuple[int, ...]

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

    def check_length(self, longest: int) -> None:
        """Raises ConfigError where sequences may be longer than the draft model's."""
        if self.spec.max_positions < longest:
            raise ConfigError(
                f"{_FIELD} {self.source.name} has positions for {self.spec.max_positions} tokens, but sequences may have {longest} here; "
                f"give --max-model-len {self.spec.max_positions}, or another draft model."
            )


def resolve_draft(config: EngineConfig, target: ModelSource, spec: DecoderSpec) -> DraftSetup | None:
    """The draft model that is asked for. Raises ConfigError or ModelError where it does not fit the target."""
    settings = read_settings(config.scheduler.speculative_config)
    if settings is None or settings.model is None:
        return None
    load_format = "dummy" if config.model.load_format == "dummy" else "auto"
    try:
        source = find_model(replace(config.model, model=settings.model, load_format=load_format, quantization=None))
        draft = families.spec_from_config(source.config)
    except ModelError as error:
        raise ModelError(f"{_FIELD}: {error.message}") from error
    if draft.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"{_FIELD} {source.name} has a vocabulary of {draft.vocab_size} tokens, but {target.name} has {spec.vocab_size}; "
            f"give a draft model with the target's tokenizer."
        )
    _check_texts(source, target)
    return DraftSetup(source, draft, _groups(draft, spec, source.name))


def draft_memory(spec: DecoderSpec, dtype_bytes: int, caches: Sequence[Tensor], groups: Sequence[KVGroup]) -> Decision:
    """All that a draft model holds, allocated at start: a bound that no load exceeds, and what it costs. ``groups``:
    the target's."""
    weights, keys = count_bytes(spec, dtype_bytes), sum(cache.nbytes for cache in caches)
    plain = sum((group.spec.bytes_per_block - group.spec.beside) * group.num_blocks for group in groups)
    tokens = max(group.num_blocks * group.spec.block_size for group in groups)
    more = int((weights + keys) / plain * tokens)
    parts = f"{weights / _MIB:.1f} MiB of weights and {keys / _MIB:.1f} MiB of keys and values, allocated now and never more"
    reason = f"{parts}; the target could keep {more} more tokens in it"
    return Decision("draft memory", f"{(weights + keys) / _MIB:.1f} MiB", reason)


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
