"""Tiny random models of every family, from a seed, saved as Hugging Face checkpoints; and tiny tokenizers.

What lives here: making them with transformers (the oracle) and tokenizers. What may not: tests, anything that runs a
model.

``save("gemma2", folder)`` writes a folder that ``headrace serve`` could be pointed at. Weights are drawn larger than
models are initialised, so that attention is far from uniform: windows, caps and rotations show in the logits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320  # wider than the tokenizer: the last logits belong to no token
WINDOW = 12

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_GPT_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}

# name → (transformers' config class, its language model class, fields beyond the sizes)
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-biased-mha-tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
    ),
    "llama3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 32}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2-windows": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (  # layers 1 and 3 would be sparse, layer 3 is named dense; router weights as they are
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "phi3-longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    "starcoder": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {"n_inner": 112}),
}


def create(name: str, seed: int = 0, **fields: Any) -> Any:
    """A transformers model in float32 with eager attention, ``fields`` over the config's."""
    import transformers

    config = _config(name, fields)
    model = getattr(transformers, MODELS[name][1])(config)
    _randomise(model, seed, one_plus=name == "gemma2")
    return model.float().eval()


def create_like(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a transformers model in another precision."""
    return copy.deepcopy(model).to(dtype).eval()


def config_dict(name: str, **fields: Any) -> dict[str, Any]:
    """What ``config.json`` of a tiny model holds."""
    found: dict[str, Any] = _config(name, fields).to_dict()
    return found


def _config(name: str, fields: Mapping[str, Any]) -> Any:
    import transformers

    config_class, model_class, own = MODELS[name]
    sizes = _GPT_SIZES if config_class.startswith("GPT") else _SIZES
    config = getattr(transformers, config_class)(
        **copy.deepcopy({**sizes, **own, **fields})
    )  # the library edits nested mappings
    config._attn_implementation = "eager"
    config.architectures = [model_class]
    return config


def _randomise(model: Any, seed: int, *, one_plus: bool) -> None:
    """Draws every weight again, in the order of names: independent of how the library initialises."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(
                    noise * (1.0 if "emb" in name or "wte" in name or "wpe" in name else 1.5 / weight.shape[-1] ** 0.5)
                )
            else:
                is_scale = name.endswith("weight") and not one_plus
                weight.copy_(0.2 * noise + (1.0 if is_scale else 0.0))


def save(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    shard_size: str = "1GB",
    **fields: Any,
) -> Path:
    """Writes a checkpoint as transformers does (``shard_size`` such as "100KB" splits it), with a tokenizer. Returns
    ``folder``."""
    create(name, seed, **fields).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        save_tokenizer(folder)
    return folder


# --- tokenizers -------------------------------------------------------------------------------------------------------

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|start|>", "<|end|>")  # ids 256 … 260
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TEXT = (
    "The mill wheel turns while the water runs; a headrace leads the water to the wheel, and the wheel turns the stone. "
    "What the river gives in spring it takes back in summer. Zwölf Räder drehen sich. 水は流れる。"
)


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer: 256 bytes (ids 0 … 255), the special tokens, then merges learned from a few
    sentences."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    # Bytes must be ids 0 … 255 and special tokens come next, so merges are learned first and renumbered.
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=292, initial_alphabet=alphabet, show_progress=False)
    )
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    words = [*alphabet, *SPECIAL, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair=None, special_tokens=[("<|bos|>", 256)]
    )
    return str(tokenizer.to_str())


def save_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json (with a chat template) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
