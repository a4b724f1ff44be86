"""Vectors of prompts on the card: replayed from graphs they are those of eager steps and, but for rounding, of the CPU,
for decoders and encoders, by last token, first token and mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace import LLM
from headrace.cost import prompt_shapes
from tests.support.card import require_card, runner_of
from tests.support.pooled import save_modules

require_card()

ENGINE: dict[str, Any] = {
    "dtype": "bfloat16", "max_num_seqs": 8, "kv_cache_memory": 64 << 20, "task": "embed", "threads": 2,
}  # fmt: skip
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertModel"], "type_vocab_size": 2},
    "llama": {"model_type": "llama", "architectures": ["LlamaModel"], "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
}
LENGTHS = (5, 40, 100, 1, 17, 30, 40, 128, 300, 64, 2)


def save(name: str, folder: Path) -> None:
    """A random checkpoint, in the names of transformers."""
    (folder / "config.json").write_text(json.dumps({**SIZES, **MODELS[name]}))
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    if name == "bert":
        matrices = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden), "attention.self.value": (hidden, hidden),
                    "attention.output.dense": (hidden, hidden), "intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}  # fmt: skip
        norms, tables = (
            ("attention.output.LayerNorm", "output.LayerNorm"),
            {"position_embeddings": 512, "token_type_embeddings": 2},
        )
        first, layer, last = "embeddings.word_embeddings", "encoder.layer", "embeddings.LayerNorm"
    else:
        matrices = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden), "self_attn.v_proj": (hidden // 2, hidden),
                    "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
                    "mlp.down_proj": (hidden, inner)}  # fmt: skip
        norms, tables = ("input_layernorm", "post_attention_layernorm"), {}
        first, layer, last = "embed_tokens", "layers", "norm"
    draw = torch.Generator().manual_seed(3)
    found = {f"{first}.weight": (SIZES["vocab_size"], hidden), f"{last}.weight": (hidden,)}
    found |= {f"embeddings.{table}.weight": (size, hidden) for table, size in tables.items()}
    for index in range(SIZES["num_hidden_layers"]):
        found |= {f"{layer}.{index}.{matrix}.weight": shape for matrix, shape in matrices.items()}
        found |= {f"{layer}.{index}.{norm}.weight": (hidden,) for norm in norms}
        if name == "bert":
            found |= {f"{layer}.{index}.{matrix}.bias": shape[:1] for matrix, shape in matrices.items()}
            found |= {f"{layer}.{index}.{norm}.bias": (hidden,) for norm in norms}
    if name == "bert":
        found[f"{last}.bias"] = (hidden,)
    weights = {
        key: torch.randn(shape, generator=draw) * shape[-1] ** -0.5 + (len(shape) == 1 and key.endswith("weight"))
        for key, shape in found.items()
    }
    save_file({key: each.bfloat16() for key, each in weights.items()}, folder / "model.safetensors")


def vectors(folder: Path, rounds: int = 3, **keywords: Any) -> tuple[np.ndarray, bool]:
    """Of the last round, [prompts, width], and whether a graph was replayed: what is seen again is recorded, and then
    replayed."""
    with LLM(str(folder), **{**ENGINE, **keywords}) as llm:
        for turn in range(rounds):
            prompts = [
                {"prompt_token_ids": [3 + (7 * place + (turn < rounds - 1)) % 900 for place in range(length)]}
                for length in LENGTHS
            ]
            alone = [llm.embed([prompt], use_tqdm=False)[0] for prompt in prompts]
            found = llm.embed(prompts, use_tqdm=False)
        graphs = runner_of(llm).passes.prompt_graphs if keywords["device"] == "cuda" else None
        captured = graphs is not None and bool(graphs.captured)
        assert runner_of(llm).passes.graphs is None
    alone_vectors, together = (np.array([each.outputs.embedding for each in side]) for side in (alone, found))
    assert (alone_vectors * together).sum(1).min() > 0.999
    return together, captured


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_vectors_of_eager_steps(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_shapes, "AGAIN_SERVED", 2)
    save(name, tmp_path)
    save_modules(tmp_path, "Transformer", "Pooling", "Normalize", mode=mode)
    graphed, captured = vectors(tmp_path, device="cuda")
    eager, none = vectors(tmp_path, device="cuda", enforce_eager=True)
    assert captured and not none
    assert (graphed * eager).sum(1).min() > 0.999
    cpu, _ = vectors(tmp_path, rounds=1, device="cpu", dtype="float32")
    assert (graphed * cpu).sum(1).min() > 0.99
