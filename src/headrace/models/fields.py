"""A strict reader of ``config.json``: every field is read, known to be harmless, or refused by name.

What lives here: typed access to a config's fields with bounds, and the lists of fields that change nothing.
What may not: torch, file reading, anything about one family (families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError

MAX_SIZE = 2**24  # no width, vocabulary or context of a real model reaches it: a damaged config fails here, not in malloc

# Fields that never change what an already trained model computes: bookkeeping, training, generation defaults, labels.
# fmt: off
_HARMLESS = frozenset(
    {
        "model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "name_or_path", "_name_or_path", "_commit_hash",
        "use_cache", "cache_implementation", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "_attn_implementation_internal", "_experts_implementation", "unsloth_version", "unsloth_fixed", "tokenizer_class", "prefix",
        "initializer_range", "initializer_factor", "attention_dropout", "attn_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
        "dropout", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        "router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "output_attentions", "output_hidden_states", "return_dict",
        "gradient_checkpointing", "pretraining_tp", "torchscript", "use_bfloat16", "tf_legacy_loss", "problem_type", "num_labels", "id2label",
        "label2id", "task_specific_params", "finetuning_task", "n_ctx", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id",
        "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "max_length",
        "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
        "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
        "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "reorder_and_upcast_attn", "inference_runner", "max_batch_size",
        "max_sequence_length", "pre_allocate_kv_cache", "validate_runner_input", "is_decoder", "ep_size",
        "pad_key_length", "runner_max_sequence_length", "is_llama_config", "transformers.js_config", "neftune_noise_alpha",
    }
)
# fmt: on

# Fields that change nothing at these values; at another value they are refused with the reason given.
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": ((), "quantized weights are not supported yet; use the unquantized checkpoint"),
    "add_cross_attention": ((False,), "cross-attention is not supported"),
    "is_encoder_decoder": ((False,), "encoders are not supported"),
    "tie_encoder_decoder": ((False,), "encoders are not supported"),
    "use_bidirectional_attention": ((False,), "only causal attention is supported"),
    "attention_bias": ((False,), "this family has no such bias"),
    "mlp_bias": ((False,), "this family has no such bias"),
    "lm_head_bias": ((False,), "a bias in the LM head is not supported"),
    "use_sliding_window": ((False,), "this family has no sliding window"),
    "layer_types": ((), "this family has no per-layer attention types"),
    "partial_rotary_factor": ((1, 1.0), "this family rotates whole heads"),
    "chunk_size_feed_forward": ((0,), "a chunked feed-forward is not supported"),
    "pruned_heads": (({},), "pruned heads are not supported"),
    "full_attn_mod": ((1,), "only full attention at every layer is known for this field"),
    "interpolate_factor": ((1,), "only 1 is known for this field"),
    "rope_interleaved": ((False,), "only rotation by halves is supported"),
    "use_mrope": ((False,), "positions in several dimensions are not supported"),
    "qkv_bias": ((False,), "this family's biases are told by attention_bias"),
    "use_qk_norm": ((False,), "this family has no norms of q and k"),
    "shared_expert_intermediate_size": ((0,), "shared experts are not supported yet"),
    "num_nextn_predict_layers": ((0,), "multi-token prediction layers are not supported yet"),
}

_REQUIRED: Any = object()


class Fields:
    """One family's view of a config (or of a mapping inside it). Reading a field marks it as understood.

    A missing field gives ``default``; without one it is an error. Every error is a ModelError that names family and field.
    """

    def __init__(self, config: Mapping[str, Any], family: str, prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix
        self._read: set[str] = set()
        self.family = family

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"config.json ({self.family}): {self._prefix}{name} {problem}.", param=name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._config.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """The field as it stands, null included; ``default`` when it is missing."""
        self._read.add(name)
        value = self._config.get(name, default)
        if value is _REQUIRED:
            raise self.error(name, "is missing; the checkpoint's config is incomplete, fetch it again")
        return value

    def integer(self, name: str, default: Any = _REQUIRED, *, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"is {_shown(value)}; an integer from {low} to {high} is needed")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number in (low, high]."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            raise self.error(name, f"is {_shown(value)}; a number above {low} and up to {high:g} is needed")
        return float(value)

    def boolean(self, name: str, default: Any) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {_shown(value)}; true or false is needed")
        return value

    def optional_integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
        return None if self.raw(name, default) is None else self.integer(name, default, low=low, high=high)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        return None if self.raw(name, default) is None else self.number(name, default)

    def integers(self, name: str, *, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A list of non-negative integers; a lone one counts as a list, null as an empty one."""
        value = self.raw(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if len(items) > 4096 or any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= high for item in items):
            raise self.error(name, f"is {_shown(value)}; a list of integers from 0 to {high} is needed")
        return tuple(items)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of exactly ``length`` positive numbers."""
        value = self.raw(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != length:
            found = f"has {len(value)} entries" if isinstance(value, list) else f"is {_shown(value)}"
            raise self.error(name, f"{found}; a list of {length} numbers is needed")
        if any(isinstance(item, bool) or not isinstance(item, (int, float)) or not 0 < item < 1e12 for item in value):
            raise self.error(name, "holds something else than positive numbers; the config is damaged, fetch it again")
        return tuple(float(item) for item in value)

    def choice(self, name: str, choices: Mapping[str, Any], default: Any = _REQUIRED) -> Any:
        """The value a word stands for."""
        value = self.raw(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"is {_shown(value)}, which is not supported; supported are {', '.join(sorted(choices))}")
        return choices[value]

    def mapping(self, name: str) -> Fields | None:
        """A mapping inside this one, None when it is missing, null or empty."""
        value = self.raw(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {_shown(value)}; a mapping is needed")
        return Fields(value, self.family, f"{self._prefix}{name}.")

    def finish(self) -> None:
        """Refuses the first field that was neither read nor known to be harmless."""
        for name in sorted(set(self._config) - self._read):
            value = self._config[name]
            if value is None or (not self._prefix and name in _HARMLESS):
                continue
            allowed, reason = _NEUTRAL.get(name, ((), "Headrace does not know this field, and it may change what the model computes"))
            if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
                raise self.error(name, f"is {_shown(value)}: {reason}, so the model is refused; remove the field only if you know it changes nothing")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
