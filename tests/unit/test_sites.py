"""The site table against sums written out by hand, and against what checkpoints of other people's code hold."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from headrace.cost.cost_model import _activation_elements, _dense_operators, _expert_operators, _norm_elements
from headrace.cost.shapes import multiplications, products
from headrace.sites import Role, Split, count_bytes, head, layer_matrices, matrices, weights
from headrace.spec import DecoderSpec, LayerSpec, MoESpec, NormKind
from headrace.worker.memory import activation_bytes
from tests.support.rooms import PACKAGE
from tests.support.specs import TINY

HIDDEN, HEADS, KV, DIM, INNER, VOCAB, LAYERS = 24, 6, 2, 8, 40, 50, 3
DENSE = DecoderSpec(
    "llama", VOCAB, HIDDEN, HEADS, KV, DIM, INNER, (LayerSpec(),) * LAYERS, 64, TINY.rope, attention_scale=1.0
)
MOE = MoESpec(num_experts=5, top_k=2, intermediate_size=12, renormalize=True)
QKV, WIDE = (HEADS + 2 * KV) * DIM, HEADS * DIM
SPECS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied_head=True),
    "biased": replace(
        DENSE, qkv_bias=True, output_bias=True, mlp_bias=True, norm=NormKind.LAYER, rope=None, gated_mlp=False
    ),
    "normed heads": replace(DENSE, qk_norm=True, qkv_bias=True),
    "sliding": replace(DENSE, sandwich_norm=True, layers=(LayerSpec(window=8), LayerSpec(), LayerSpec(window=8))),
    "sparse": replace(DENSE, layers=(LayerSpec(moe=MOE),) * LAYERS),
    "sparse in part": replace(DENSE, layers=(LayerSpec(), LayerSpec(moe=MOE), LayerSpec(moe=MOE))),
}


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> DecoderSpec:
    return SPECS[request.param]


def by_hand(spec: DecoderSpec) -> dict[str, int]:
    """Elements of everything."""
    sparse = sum(layer.moe is not None for layer in spec.layers)
    dense, ups, norm = LAYERS - sparse, 2 if spec.gated_mlp else 1, HIDDEN * (2 if spec.norm is NormKind.LAYER else 1)
    return {
        "embedding": VOCAB * HIDDEN + (0 if spec.rope else 64 * HIDDEN),
        "norm": norm * (LAYERS * (4 if spec.sandwich_norm else 2) + 1) + (2 * DIM * LAYERS if spec.qk_norm else 0),
        "qkv": LAYERS * (HIDDEN + spec.qkv_bias) * QKV,
        "output": LAYERS * (WIDE + spec.output_bias) * HIDDEN,
        "router": sparse * 5 * HIDDEN,
        "up": dense * (HIDDEN + spec.mlp_bias) * ups * INNER + sparse * 5 * HIDDEN * 2 * 12,
        "down": dense * (INNER + spec.mlp_bias) * HIDDEN + sparse * 5 * 12 * HIDDEN,
        "head": VOCAB * HIDDEN,
        "classifier": 0,
    }


def test_every_weight_has_the_size_it_has_by_hand(spec: DecoderSpec) -> None:
    found = dict.fromkeys(Role, 0)
    for site in weights(spec):
        found[site.role] += site.num_elements
    assert {role.value: count for role, count in found.items()} == by_hand(spec)
    assert count_bytes(spec, 1) == sum(by_hand(spec).values()) - (VOCAB * HIDDEN if spec.tied_head else 0)
    names = [name for site in weights(spec) for name in site.tensors]
    assert len(names) == len(set(names))


def test_costs_are_sums_over_the_table(spec: DecoderSpec) -> None:
    sizes, sparse = by_hand(spec), sum(layer.moe is not None for layer in spec.layers)
    dense, ups = LAYERS - sparse, 2 if spec.gated_mlp else 1
    costs = {name: (held, flops) for name, held, flops in _dense_operators(spec, 2.0)}
    assert costs["qkv"] == (2 * sizes["qkv"], 2 * LAYERS * QKV * HIDDEN)
    assert costs["output"] == (2 * sizes["output"], 2 * LAYERS * WIDE * HIDDEN)
    assert costs.get("router", (0, 0)) == (2 * sizes["router"], 2 * sizes["router"])
    assert costs.get("gate and up" if ups == 2 else "up", (0, 0))[1] == 2 * dense * ups * INNER * HIDDEN
    assert costs.get("down", (0, 0))[1] == 2 * dense * INNER * HIDDEN
    experts = [(op.spec, op.num_layers, op.expert_bytes, op.flops_per_token) for op in _expert_operators(spec, 2.0, ())]
    assert experts == ([(MOE, sparse, 2 * 3 * HIDDEN * 12, 2 * sparse * 2 * 3 * HIDDEN * 12)] if sparse else [])
    assert _norm_elements(spec) == sizes["norm"]
    inner = dense * (ups + 1) * INNER + sparse * 2 * 3 * 12
    assert _activation_elements(spec) == LAYERS * (8 * HIDDEN + 2 * QKV + 2 * WIDE) + 2 * inner
    widest = max(INNER if dense else 0, 24 if sparse else 0)
    assert activation_bytes(spec, 7, 3, 2) == 7 * (4 * HIDDEN + QKV + WIDE + 3 * widest) * 2 + 3 * VOCAB * (2 + 8)
    assert multiplications(spec) == (LAYERS * (QKV + WIDE) + inner) * HIDDEN / LAYERS


def test_products_and_splits_follow_the_table(spec: DecoderSpec) -> None:
    dense = sum(layer.moe is None for layer in spec.layers)
    wide = 2 * INNER if spec.gated_mlp else INNER
    up = ("gate and up" if spec.gated_mlp else "up", HIDDEN, wide, dense)
    expected = [("qkv", HIDDEN, QKV, LAYERS), ("output", WIDE, HIDDEN, LAYERS), up, ("down", INNER, HIDDEN, dense)]
    assert [(each.name, each.ins, each.outs, each.layers) for each in products(spec)] == [
        each for each in expected if each[3]
    ]
    assert all(
        (site.split is Split.ROW) == (site.outs == HIDDEN and site.role in (Role.OUTPUT, Role.DOWN))
        for site in matrices(spec)
    )
    sites = layer_matrices(spec, 0)
    assert sites[Role.QKV].parts == (HEADS * DIM, KV * DIM, KV * DIM) and (head(spec).outs, head(spec).ins) == (
        VOCAB,
        HIDDEN,
    )


def test_the_width_of_qkv_is_derived_in_one_place() -> None:
    """Whoever adds up query and KV heads again writes the table a second time."""
    again = re.compile(r"num_heads \+ 2 \* [\w.]*kv_heads|num_kv_heads\) \* |\bheads \+ 2 \* kv")
    found = [path.name for path in sorted(PACKAGE.rglob("*.py")) if again.search(path.read_text(encoding="utf-8"))]
    assert found == []
