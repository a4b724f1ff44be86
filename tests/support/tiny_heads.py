"""Tiny draft heads from a seed, saved as they are published, and what they propose, computed plainly.

What lives here: checkpoints, and an oracle without caches: every entry from scratch, on transformers' hidden states.
What may not: tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import tiny

HEADS, KV_HEADS, EPS = 4, 2, 1e-5
DRAWN = 200  # tokens that an EAGLE-3 head draws from


def config(target: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """As yuhuili's heads have it: a Llama of one layer."""
    sizes = {name: target[name] for name in ("hidden_size", "vocab_size")}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "intermediate_size": 80,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64, "hidden_act": "silu",
        "rms_norm_eps": EPS, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "pad_token_id": 0,
        "use_cache": True, **sizes, **more,
    }  # fmt: skip


# What the weights below are called where they are published; + stands for the layer.
PUBLISHED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "eagle": ("layers.0.", {}),
    "eagle3": ("midlayer.", {"hidden_norm": "+hidden_norm"}),
    "speculators": ("layers.0.", {"hidden_norm": "+hidden_norm"}),
    "mimo": (
        "model.mtp_layers.0.",
        {"fc": "+input_proj", "embedding_norm": "+token_layernorm", "hidden_norm": "+hidden_layernorm", "norm": "+final_layernorm"},
    ),
    "qwen": (
        "mtp.layers.0.",
        {"fc": "mtp.fc", "embedding_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm"},
    ),
    "deepseek": (
        "model.layers.4.",
        {"fc": "+eh_proj", "embedding_norm": "+enorm", "hidden_norm": "+hnorm", "norm": "+shared_head.norm"},
    ),
}  # fmt: skip


def published(method: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    at, words = PUBLISHED[method]

    def name(own: str) -> str:
        module, _, kind = own.rpartition(".")
        word = words.get(module, module.replace("layer.", "+"))
        return f"{word}.{kind}".replace("+", at) if module else own

    return {name(own): each for own, each in tensors.items()}


def tensors(method: str, hidden: int, vocab: int, seed: int = 0, target: int | None = None) -> dict[str, Tensor]:
    """Random ones. ``target``: its hidden size, where it is another."""
    make, inner, head = torch.Generator().manual_seed(seed), 80, hidden // HEADS

    def matrix(outs: int, ins: int) -> Tensor:
        return torch.randn(outs, ins, generator=make) * 1.5 / ins**0.5

    def norm() -> Tensor:
        return 1.0 + 0.2 * torch.randn(hidden, generator=make)

    wide = 2 * hidden if method == "eagle3" else hidden
    found = {
        "fc.weight": matrix(hidden, 3 * (target or hidden) if method == "eagle3" else 2 * hidden),
        "layer.self_attn.q_proj.weight": matrix(HEADS * head, wide),
        "layer.self_attn.k_proj.weight": matrix(KV_HEADS * head, wide),
        "layer.self_attn.v_proj.weight": matrix(KV_HEADS * head, wide),
        "layer.self_attn.o_proj.weight": matrix(hidden, HEADS * head),
        "layer.mlp.gate_proj.weight": matrix(inner, hidden),
        "layer.mlp.up_proj.weight": matrix(inner, hidden),
        "layer.mlp.down_proj.weight": matrix(hidden, inner),
        "layer.post_attention_layernorm.weight": norm(),
    }
    if method == "eagle":
        return {**found, "fc.bias": 0.1 * norm()}
    found |= {"layer.input_layernorm.weight": norm(), "hidden_norm.weight": norm(), "norm.weight": norm()}
    if method == "mimo":
        found |= {f"layer.self_attn.{part}_proj.bias": 0.3 * torch.randn(HEADS * head if part == "q" else KV_HEADS * head,
                                                                         generator=make) for part in "qkv"}  # fmt: skip
    if method != "eagle3":
        return {**found, "embedding_norm.weight": norm()}
    drawn = torch.randperm(vocab, generator=make)[:DRAWN].sort().values
    return {
        **found, "embed_tokens.weight": matrix(vocab, hidden), "lm_head.weight": matrix(len(drawn), hidden),
        "d2t": drawn - torch.arange(len(drawn)), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, drawn, value=True),
    }  # fmt: skip


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: each.clone(memory_format=torch.contiguous_format) for name, each in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def save_foreseeing(folder: Path, method: str, size: int = 64) -> tuple[Path, Path]:
    """A target of ``size`` tokens whose next token follows from the last one alone, by a permutation, and a head that
    takes nothing but hidden states: it sees two tokens ahead of them."""
    fields = {"vocab_size": size, "hidden_size": size, "num_attention_heads": HEADS, "num_hidden_layers": 4}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    target = tiny.save("llama", folder / "target", tokenizer=False, **fields, **ids)
    base = json.loads((target / "config.json").read_text())
    after, one = torch.randperm(size, generator=torch.Generator().manual_seed(4)), torch.eye(size)
    step = one[after].T  # the hidden states of t → those of after[t], or its logits
    stored = _silent(load_file(target / "model.safetensors"))
    save(target, base, stored | {"model.embed_tokens.weight": one, "lm_head.weight": step})
    head, more = _silent(tensors(method, size, size)), dict[str, Any]()
    if method == "eagle":
        head["fc.weight"] = torch.cat([torch.zeros(size, size), step], dim=1)
    else:  # its own tokens are the target's in reverse
        drawn = torch.arange(size).flip(0)
        head |= {"fc.weight": torch.cat([step, step, step], dim=1), "embed_tokens.weight": one}
        head |= {"lm_head.weight": step.flip(0), "d2t": drawn - torch.arange(size), "t2d": torch.ones(size).bool()}
        more = {"draft_vocab_size": size, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return target, save(folder / "head", config(base, **more), published(method, head))


def _silent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layers that add nothing to the residual stream, and norms that only scale."""
    quiet = ("o_proj", "down_proj", "bias")
    return {
        name: torch.zeros_like(each)
        if any(word in name for word in quiet)
        else torch.ones_like(each)
        if "norm" in name
        else each
        for name, each in tensors.items()
    }


class Oracle:
    """``propose(ids, n)``: what a head drafts behind ``ids``, greedily."""

    def __init__(
        self,
        target: Any,
        method: str,
        tensors: Mapping[str, Tensor],
        taps: tuple[int, ...] = (),
        normed_residual: bool = False,
    ) -> None:
        self._normed_residual = normed_residual
        self._target, self._method, self._taps, self._t = target, method, taps, dict(tensors)

    def propose(self, ids: list[int], count: int) -> list[int]:
        with torch.no_grad():
            return self._propose(ids, count)

    def _propose(self, ids: list[int], count: int) -> list[int]:
        states = self._target.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        carried = states.last_hidden_state[0]
        if self._method == "eagle3":
            carried = self._fc(torch.cat([states.hidden_states[each][0] for each in self._taps], dim=-1))
        drafted: list[int] = []
        for _ in range(count):
            out, normed = self._entries([*ids[1:], *drafted], carried)
            drafted.append(self._token(normed[-1]))
            carried = torch.cat([carried, (normed if self._method in ("mimo", "qwen") else out)[-1:]])
        return drafted

    def _token(self, hidden: Tensor) -> int:
        if self._method != "eagle3":
            return int(self._target.lm_head(hidden).argmax())
        drawn = int((self._t["lm_head.weight"] @ hidden).argmax())
        return drawn + int(self._t["d2t"][drawn])

    def _fc(self, x: Tensor) -> Tensor:
        return F.linear(x, self._t["fc.weight"], self._t.get("fc.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._t[f"{name}.weight"], EPS) if f"{name}.weight" in self._t else x

    def _entries(self, ids: list[int], carried: Tensor) -> tuple[Tensor, Tensor]:
        t = self._t
        embedded = t.get("embed_tokens.weight", self._target.model.embed_tokens.weight)[torch.tensor(ids)]
        hidden = self._norm(carried, "hidden_norm")
        if self._method == "eagle3":
            stream = hidden if self._normed_residual else carried
            x = torch.cat([self._norm(embedded, "layer.input_layernorm"), hidden], -1)
        else:
            pair = [self._norm(embedded, "embedding_norm"), hidden]
            stream = self._fc(torch.cat(pair[::-1] if self._method == "mimo" else pair, -1))
            x = self._norm(stream, "layer.input_layernorm")
        stream = stream + self._attention(x)
        x = self._norm(stream, "layer.post_attention_layernorm")
        x = F.silu(x @ t["layer.mlp.gate_proj.weight"].T) * (x @ t["layer.mlp.up_proj.weight"].T)
        stream = stream + x @ t["layer.mlp.down_proj.weight"].T
        return stream, self._norm(stream, "norm")

    def _attention(self, x: Tensor) -> Tensor:
        at = "layer.self_attn."
        q, k, v = (
            F.linear(x, self._t[f"{at}{name}_proj.weight"], self._t.get(f"{at}{name}_proj.bias"))
            .view(len(x), heads, -1)
            .transpose(0, 1)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        out = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).reshape(len(x), -1) @ self._t[at + "o_proj.weight"].T


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
