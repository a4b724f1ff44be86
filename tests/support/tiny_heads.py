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
from safetensors.torch import save_file
from torch import Tensor

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


def tensors(method: str, hidden: int, vocab: int, seed: int = 0) -> dict[str, Tensor]:
    """Random ones, by the names that are published."""
    make, beside = torch.Generator().manual_seed(seed), method == "eagle3"
    at, inner, head = "midlayer." if beside else "layers.0.", 80, hidden // HEADS

    def matrix(outs: int, ins: int) -> Tensor:
        return torch.randn(outs, ins, generator=make) * 1.5 / ins**0.5

    def norm() -> Tensor:
        return 1.0 + 0.2 * torch.randn(hidden, generator=make)

    wide = 2 * hidden if beside else hidden
    found = {
        "fc.weight": matrix(hidden, (3 if beside else 2) * hidden),
        at + "self_attn.q_proj.weight": matrix(HEADS * head, wide),
        at + "self_attn.k_proj.weight": matrix(KV_HEADS * head, wide),
        at + "self_attn.v_proj.weight": matrix(KV_HEADS * head, wide),
        at + "self_attn.o_proj.weight": matrix(hidden, HEADS * head),
        at + "mlp.gate_proj.weight": matrix(inner, hidden),
        at + "mlp.up_proj.weight": matrix(inner, hidden),
        at + "mlp.down_proj.weight": matrix(hidden, inner),
        at + "post_attention_layernorm.weight": norm(),
    }
    if not beside:
        return {**found, "fc.bias": 0.1 * norm()}
    drawn = torch.randperm(vocab, generator=make)[:DRAWN].sort().values
    count = len(drawn)
    return {
        **found, "embed_tokens.weight": matrix(vocab, hidden),
        "midlayer.hidden_norm.weight": norm(), "midlayer.input_layernorm.weight": norm(), "norm.weight": norm(),
        "lm_head.weight": matrix(count, hidden), "d2t": drawn - torch.arange(count),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, drawn, value=True),
    }  # fmt: skip


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


class Oracle:
    """``propose(ids, n)``: what a head drafts behind ``ids``, greedily."""

    def __init__(self, target: Any, method: str, tensors: Mapping[str, Tensor], taps: tuple[int, ...] = ()) -> None:
        self._target, self._method, self._taps, self._t = target, method, taps, dict(tensors)

    def propose(self, ids: list[int], count: int) -> list[int]:
        with torch.no_grad():
            return self._propose(ids, count)

    def _propose(self, ids: list[int], count: int) -> list[int]:
        states = self._target.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        carried = states.last_hidden_state[0]
        if self._method == "eagle3":
            carried = torch.cat([states.hidden_states[each][0] for each in self._taps], dim=-1) @ self._t["fc.weight"].T
        drafted: list[int] = []
        for _ in range(count):
            shown, normed = self._entries([*ids[1:], *drafted], carried)
            drafted.append(self._token(shown[-1] if self._method != "eagle3" else normed[-1]))
            carried = torch.cat([carried, shown[-1:]])
        return drafted

    def _token(self, hidden: Tensor) -> int:
        if self._method != "eagle3":
            return int(self._target.lm_head(hidden).argmax())
        drawn = int((self._t["lm_head.weight"] @ hidden).argmax())
        return drawn + int(self._t["d2t"][drawn])

    def _entries(self, ids: list[int], carried: Tensor) -> tuple[Tensor, Tensor]:
        t = self._t
        embedded = t.get("embed_tokens.weight", self._target.model.embed_tokens.weight)[torch.tensor(ids)]
        at = "midlayer." if self._method == "eagle3" else "layers.0."
        if self._method == "eagle3":
            stream = carried
            x = torch.cat(
                [_rms(embedded, t[at + "input_layernorm.weight"]), _rms(stream, t[at + "hidden_norm.weight"])], -1
            )
        else:
            stream = x = torch.cat([embedded, carried], -1) @ t["fc.weight"].T + t["fc.bias"]
        stream = stream + self._attention(x, at)
        x = _rms(stream, t[at + "post_attention_layernorm.weight"])
        x = F.silu(x @ t[at + "mlp.gate_proj.weight"].T) * (x @ t[at + "mlp.up_proj.weight"].T)
        stream = stream + x @ t[at + "mlp.down_proj.weight"].T
        return stream, _rms(stream, t["norm.weight"]) if self._method == "eagle3" else stream

    def _attention(self, x: Tensor, at: str) -> Tensor:
        q, k, v = (
            (x @ self._t[f"{at}self_attn.{name}_proj.weight"].T).view(len(x), heads, -1).transpose(0, 1)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        out = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).reshape(len(x), -1) @ self._t[at + "self_attn.o_proj.weight"].T


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
