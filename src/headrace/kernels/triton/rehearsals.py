"""For each operation: small calls that between them compile every specialisation a model will launch.

What lives here: their inputs. What may not: kernels, threads.

A kernel is compiled for its element types, its constants, and for whether each integer it is given is 1, a multiple of 16 or neither; so
inputs here have a model's widths but few tokens. Inputs are made when a call is made, in the thread that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.around import MOST_ROWS
from headrace.kernels.candidate import Site, Sizes
from headrace.kernels.triton.candidates import can_chain
from headrace.kernels.triton.sampling import pick_above
from headrace.kernels.triton.thresholds import keep_thresholds
from headrace.spec import attention_groups

Calls = Iterator[tuple[str, Callable[[], object]]]
_TOKENS = 2  # not 1, which kernels may be specialised for; of one size all batches are


def _counts(site: Site) -> tuple[int, ...]:
    """Tokens for which a kernel is built anew: few, whose kernels may begin early, and many."""
    return (_TOKENS, MOST_ROWS + 1) if can_chain(site) else (_TOKENS,)


def norms(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    """Hidden states without and with a residual; heads of q and of k, where they are normed."""
    spec, dtype = sizes.spec, site.facts["dtype"]

    def norm(x: Callable[[], Tensor], width: int, *, residual: bool) -> object:
        weight = zeros(site, width, dtype=site.facts.get("weight_dtype", dtype))
        bias = (weight,) if site.op == "layer_norm" else ()
        value = x()
        return run(value, weight, *bias, spec.norm_eps, value if residual else None)

    yield "hidden and residual", partial(norm, partial(zeros, site, _TOKENS, spec.hidden_size), spec.hidden_size, residual=True)
    for tokens in _counts(site):
        yield f"hidden, {tokens} tokens", partial(norm, partial(zeros, site, tokens, spec.hidden_size), spec.hidden_size, residual=False)
    if spec.qk_norm and site.op == "rms_norm":
        for index, name in enumerate(("heads of q", "heads of k")):
            yield name, partial(norm, partial(_head, site, sizes, index), spec.head_dim, residual=False)


def rotary_writes(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    spec = sizes.spec

    def write(layers: int, tokens: int) -> object:
        q, k, v = _heads(site, sizes, tokens)
        if spec.qk_norm:
            q, k = q.contiguous(), k.contiguous()
        angles = None if spec.rope is None else zeros(site, 1, spec.rope.rotary_dim, dtype=torch.float32)
        cache = zeros(site, 1, 2 * layers, spec.num_kv_heads, sizes.block_size, spec.head_dim)
        at = zeros(site, tokens, dtype=torch.int64)
        return run(q, k, v, at, angles, cache[:, 0], cache[:, 1], at)

    for _, layers in attention_groups(spec):
        for tokens in _counts(site):
            yield f"{len(layers)} layers, {tokens} tokens", partial(write, len(layers), tokens)


def activations(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    spec = sizes.spec
    width = spec.intermediate_size * (2 if site.op == "gated_activation" else 1)
    yield "inner", lambda: run(zeros(site, _TOKENS, width), spec.activation)


def embeddings(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    spec = sizes.spec

    def look_up(tokens: int, scale: float | None) -> object:
        return run(zeros(site, tokens, dtype=torch.int64), zeros(site, 1, spec.hidden_size), scale)

    yield "tokens", partial(look_up, _TOKENS, spec.embedding_scale)
    if spec.rope is None:
        yield "positions", partial(look_up, _TOKENS, None)


def attentions(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    spec = sizes.spec
    windows = [layer.window for layer in spec.layers]
    calls = run.rehearse(spec.num_heads, sizes.block_size, windows, spec.attention_soft_cap)  # type: ignore[attr-defined]
    yield from ((f"variant {index}", call) for index, call in enumerate(calls))


def experts(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    """A few tokens, then 4, 16 and 64 pairs an expert: what tiles are chosen by. Routing all to the same experts changes no launch."""
    spec = sizes.spec
    moe = next(layer.moe for layer in spec.layers if layer.moe is not None)
    gate_up = _empty(site, moe.num_experts, 2 * moe.intermediate_size, spec.hidden_size)  # one for all calls: it is the largest layer
    down = _empty(site, moe.num_experts, spec.hidden_size, moe.intermediate_size)

    def compute(tokens: int) -> object:
        x, router = zeros(site, tokens, spec.hidden_size), zeros(site, tokens, moe.num_experts)
        return run(x, router, gate_up, down, moe.top_k, moe.renormalize, spec.activation)

    for tokens in (_TOKENS, *(pairs * moe.num_experts // moe.top_k for pairs in (4, 16, 64))):
        yield f"{tokens} tokens", partial(compute, min(tokens, sizes.max_num_batched_tokens))


def linears(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    """A kernel of our own (torch's products need none): every tile the layer will choose, over a corner of the weight."""
    ins, outs = (_corner(site.facts[name]) for name in ("in_features", "out_features"))

    def multiply(tile: Any, *, bias: bool) -> object:
        layer = run(zeros(site, outs, ins), zeros(site, outs) if bias else None)
        return layer.compute(zeros(site, _TOKENS, ins), tile)

    tile_of = run(_empty(site, 0, ins), None).tile
    tiles = dict.fromkeys(tile_of(tokens, site.facts["out_features"]) for tokens in range(1, sizes.max_num_batched_tokens + 1, 16))
    for bias in {False, sizes.spec.qkv_bias or sizes.spec.output_bias or sizes.spec.mlp_bias}:
        for tile in tiles:
            yield f"{ins} to {outs}{' with bias' if bias else ''}, {tile}", partial(multiply, tile, bias=bias)


def picks(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    """Every way to sample, for one row up to as many as there can be: one after another where they share what is compiled. Filters and what
    picks behind them are compiled side by side: together they would take longer than any other kernel."""
    vocab = sizes.spec.vocab_size
    counts = dict.fromkeys(min(count, sizes.max_num_seqs) for count in (1, 2, 4, 8, 16, 32, 64, 128, 256))

    def pick(rows: int, kind: str) -> object:
        logits, peak = zeros(site, rows, vocab), zeros(site, rows)
        whole = zeros(site, rows, dtype=torch.int64)
        if kind == "greedy":
            return run(logits)
        if kind in ("chosen", "best"):
            return run(logits, whole, min(5, vocab) if kind == "best" else 0)
        if kind == "filters":
            return keep_thresholds(logits, whole + 50, peak + 0.9, peak, scale=(peak, peak + 1.0))
        if kind == "filtered":
            return pick_above(logits, (peak, peak + 1.0), peak, whole, whole, programmatic=can_chain(site))
        return run(logits, peak, peak + 1.0, None, whole, whole)

    def pick_all(kinds: tuple[str, ...]) -> None:
        for kind in kinds:
            for rows in counts:
                pick(rows, kind)

    together: dict[str, list[tuple[str, ...]]] = {
        "greedy_tokens": [("greedy",)],
        "pick_tokens": [("filters",), ("random",), ("filtered",)],
        "score_tokens": [("chosen", "best")],
    }
    for kinds in together[site.op]:
        yield ", ".join(kinds), partial(pick_all, kinds)


def row_writes(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    def write() -> object:
        rows, at = zeros(site, _TOKENS, sizes.max_model_len), zeros(site, _TOKENS)
        return run(rows, at, at.long(), zeros(site, _TOKENS + 1), 1)

    yield "new rows", write


def gathers(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    def gather() -> object:
        tokens, at = zeros(site, _TOKENS, sizes.max_model_len), zeros(site, _TOKENS)
        width = -(-sizes.max_model_len // sizes.block_size)
        return run(tokens, zeros(site, _TOKENS, width), at, at.clone(), at.clone(), at.clone(), sizes.block_size, width)

    yield "step", gather


def stores(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    def store() -> object:
        at = zeros(site, _TOKENS)
        return run(zeros(site, _TOKENS, sizes.max_model_len), at, at.clone(), at.long(), at.float())

    yield "step", store


def fetches(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    yield "step", lambda: run(zeros(site, 2, 7, _TOKENS), zeros(site, 1), zeros(site, 3, _TOKENS), zeros(site, 2, 2))


def _corner(size: int) -> int:
    """A smaller size that kernels cannot tell from ``size``."""
    return size if size <= 512 else 512 + size % 16


def _heads(site: Site, sizes: Sizes, tokens: int) -> tuple[Tensor, ...]:
    """q, k and v as they come out of the merged product."""
    spec = sizes.spec
    merged = zeros(site, tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    return merged.split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)


def _head(site: Site, sizes: Sizes, index: int) -> Tensor:
    return _heads(site, sizes, _TOKENS)[index]


def zeros(site: Site, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(shape, dtype=dtype or site.facts["dtype"], device=site.device)


def _empty(site: Site, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=site.facts["dtype"], device=site.device)
