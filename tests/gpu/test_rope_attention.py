"""Attention with rotary embedding and the cache write inside, on the card: against the twin, and through an engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from headrace.kernels import Kernels
from headrace.kernels.attention import kv_codes, reference
from headrace.kernels.attention.candidates import ROPE, ROPE_CASCADE
from headrace.kernels.attention.reference import HeadNorms
from headrace.kernels.candidate import CallSite, Card, KernelContext
from headrace.kernels.inputs import AttentionInputs
from headrace.kernels.step.candidates import PERSISTENT
from headrace.spec import KV_FORMATS
from headrace.worker.graphs import Kind
from tests.support import tiny
from tests.support.card import STRICT, check, params, require_card, runner_of
from tests.support.kernel_cases import PagedCase, called, using
from tests.support.quantized_kv import QuantizedCase, awkward

require_card()

from headrace.kernels.attention.cuda_rope import RopeAttention, create_plain  # noqa: E402  (needs Triton's cache, so a card's packages)
from headrace.kernels.attention.triton_plan import ALIKE  # noqa: E402

SOME = random.Random(1)
LENGTHS = {
    "one key": [1],
    "few": [1000, 1, 0, 4097, 64, 65, 63, 128, 129],
    "one long": [9000],
    "padding alone": [0, 0, 0],
    "many": [SOME.choice((0, 1, 5, 63, 64, 65, 191, 192, 193, 300, 1000, 2500)) for _ in range(70)],
    "uneven": [int(1 + 9000 * SOME.random() ** 3) for _ in range(24)],
    "alike, two pairs a warp": [0, *(150 + row % 41 for row in range(140)), 0, 0],
    "alike, one pair a warp": [129, *(100 + row % 31 for row in range(69)), 0],
}
SHAPES = [
    (32, 8, 128, 16),
    (32, 8, 64, 128),
    (32, 8, 64, 16),
    (32, 8, 128, 128),
    (32, 8, 128, 8),
    (8, 8, 128, 16),
    (32, 4, 128, 32),
    (24, 8, 64, 64),
]


CODES = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")


def made(
    heads: int, kv_heads: int, dim: int, kv: str | None = None, *, cascade: bool = False, pdl: bool = True,
    normed: bool = False,
) -> RopeAttention:  # fmt: skip
    facts: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": dim, "num_heads": heads, "num_kv_heads": kv_heads}
    facts |= {"normed": torch.bfloat16 if normed else None, "kv": None if kv is None else KV_FORMATS[kv]}
    device = torch.device("cuda")
    context = KernelContext(Card.of(device), using(programmatic_launch=pdl))
    site = CallSite("rope_attention", device, called("rope_attention", **facts)[1], context)
    return create_plain(site, cascade=cascade)


class Step:
    """A decode step over one layer of two. What no sequence sees, and the newest keys' places, hold NaN."""

    def __init__(
        self, contexts: list[int], heads: int, kv_heads: int, dim: int, block_size: int, kv: str | None = None, *,
        normed: bool = False,
    ) -> None:  # fmt: skip
        lengths, sizes = [(1, each) for each in contexts], {"heads": heads, "kv_heads": kv_heads, "dim": dim}
        case: PagedCase
        if kv is None:
            case = PagedCase(lengths, **sizes, dtype=torch.bfloat16, block_size=block_size)
        else:
            case = QuantizedCase(kv, lengths, **sizes, dtype=torch.bfloat16, block_size=block_size)
        newest = [
            (int(case.table[row, (each - 1) // block_size]), (each - 1) % block_size) if each else (-1, 0)
            for row, each in enumerate(contexts)
        ]
        case.poison(None)
        parts, self.quantized = [case.k_cache, case.v_cache], None
        if isinstance(case, QuantizedCase):
            held = case.quantized
            scales = [None if each is None else each.cuda() for each in (held.k_scales, held.v_scales)]
            self.quantized = replace(held, k_scales=scales[0], v_scales=scales[1])
            parts = [part for cache in parts for part in kv_codes.parts(cache, held.format)]
        for block, offset in newest:
            for part in parts if block >= 0 else ():
                part[block, :, offset] = 255 if part.dtype is torch.uint8 else float("nan")
        slots = torch.tensor([block * block_size + offset if block >= 0 else -1 for block, offset in newest])
        lengths = torch.tensor(contexts, dtype=torch.int32)
        starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
        self.inputs = AttentionInputs(
            case.table.cuda(), starts.cuda(), lengths.cuda(), slots.cuda(), block_size, 1, max(contexts)
        )
        self.caches = [each.cuda() for each in (case.k_cache, case.v_cache)]
        self.positions = (lengths.long() - 1).clamp(min=0).cuda()
        angles = torch.arange(max(contexts) + 1)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).cuda()
        generator = torch.Generator().manual_seed(1)
        self.qkv = torch.randn((len(contexts), heads + 2 * kv_heads, dim), generator=generator).bfloat16().cuda()
        q, k = (1.0 + torch.rand((2, dim), generator=generator)).bfloat16().cuda()
        self.norms = HeadNorms(q, k, 1e-3) if normed else None

    def run(self, kernel: Any, caches: list[torch.Tensor]) -> torch.Tensor:
        step, scale = (self.qkv.clone(), self.positions, self.cos_sin), self.qkv.shape[2] ** -0.5
        how = replace(self.inputs), scale, self.norms, self.quantized
        out: torch.Tensor = kernel(*step, *caches, *how)
        return out

    def compare(self, kernel: Any) -> torch.Tensor:
        """Results are the twin's, the caches too (but for the last bit of a turned key, and what becomes of it), and
        the same when asked again."""
        ours, theirs = [each.clone() for each in self.caches], [each.clone() for each in self.caches]
        got, want = self.run(kernel, ours), self.run(reference.rope_attention, theirs)
        check(got, want)
        # of what is normed, a last bit may be turned onto something smaller
        small = 1e-6 if self.norms is None else 2**-5
        if self.quantized is None:
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=2**-7, atol=small, equal_nan=True)
        assert torch.equal(self.run(kernel, ours), got)
        return got


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_attention(heads: int, kv_heads: int, dim: int, block_size: int, lengths: str) -> None:
    """Spans that begin and end anywhere, sequences of no key and of one, blocks smaller and larger than what a warp
    takes."""
    Step(LENGTHS[lengths], heads, kv_heads, dim, block_size).compare(made(heads, kv_heads, dim))


@pytest.mark.parametrize("kv", [None, "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(32, 4, 128, 32), (32, 8, 64, 128)])
def test_heads_are_normed_before_they_are_turned(
    heads: int, kv_heads: int, dim: int, block_size: int, lengths: str, kv: str | None
) -> None:
    shape = heads, kv_heads, dim
    Step(LENGTHS[lengths], *shape, block_size, kv, normed=True).compare(made(*shape, kv, normed=True))


@pytest.mark.parametrize("kv", CODES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(32, 8, 128, 128), (32, 8, 64, 16), (24, 8, 128, 8), (8, 8, 64, 128)],
)
def test_attention_over_codes(heads: int, kv_heads: int, dim: int, block_size: int, lengths: str, kv: str) -> None:
    Step(LENGTHS[lengths], heads, kv_heads, dim, block_size, kv).compare(made(heads, kv_heads, dim, kv))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kv", CODES)
def test_codes_of_any_number_are_the_twins(kv: str, dim: int) -> None:
    """Nothing is turned here, so that nothing rounds: zeros, outliers, what is no number."""
    step, odd = Step([70 + row for row in range(24)], 32, 8, dim, 16, kv), awkward(24, 8, dim, torch.bfloat16).cuda()
    step.cos_sin[:, : dim // 2], step.cos_sin[:, dim // 2 :] = 1.0, 0.0
    step.qkv[:, 32:40], step.qkv[:, 40:] = odd, odd.flip(0)
    ours, theirs = [each.clone() for each in step.caches], [each.clone() for each in step.caches]
    got, want = step.run(made(32, 8, dim, kv), ours), step.run(reference.rope_attention, theirs)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    whole = [*range(6), *range(9, 15), *range(18, 24)]  # of numbers alone
    check(got[whole], want[whole])


@pytest.mark.parametrize(
    ("lengths", "alike"), [("alike, two pairs a warp", True), ("alike, one pair a warp", True), ("many", False)]
)
def test_warps_take_pairs_whole_where_sequences_are_many_and_alike(lengths: str, alike: bool) -> None:
    """What is found by test_attention for those lengths is found by the other form of the kernel."""
    step, kernel = Step(LENGTHS[lengths], 32, 8, 128, 128), made(32, 8, 128)
    step.run(kernel, step.caches)
    assert kernel._plan is not None and set(kernel._plan[1].spans[:, ALIKE.value].tolist()) == {int(alike)}


@pytest.mark.parametrize(
    ("rows", "shared", "served"), [(42, None, False), (42, 5000, False), (42, 0, True), (15, None, True)]
)
def test_steps_in_which_keys_may_be_shared_are_left_to_cascade_attention(
    rows: int, shared: int | None, served: bool
) -> None:
    step = Step([700 + 3 * row for row in range(rows)], 32, 8, 128, 16)
    step.inputs = replace(step.inputs, shared_tokens=shared)
    assert (step.run(made(32, 8, 128, cascade=True), step.caches) is not None) == served
    step.compare(made(32, 8, 128))


def test_over_codes_many_more_tokens_must_be_shared() -> None:
    step, kernel = (
        Step([700 + 3 * row for row in range(42)], 32, 8, 128, 16, "int8"),
        made(32, 8, 128, "int8", cascade=True),
    )
    for shared, served in ((42 * 4096 - 1, True), (42 * 4096, False)):
        step.inputs = replace(step.inputs, shared_tokens=shared)
        assert (step.run(kernel, step.caches) is not None) == served


@pytest.mark.parametrize("kv", [None, *CODES])
def test_scores_of_any_size(kv: str | None) -> None:
    for size in (300.0, 1e-6):
        step = Step(LENGTHS["few"], 32, 8, 128, 16, kv)
        step.qkv[::2, :32] *= size
        step.compare(made(32, 8, 128, kv))


def test_a_broken_sequence_leaves_the_others_alone() -> None:
    step, kernel = Step([300, 1000, 200, 64], 32, 8, 128, 16), made(32, 8, 128)
    whole = step.run(kernel, [each.clone() for each in step.caches])
    step.qkv[1] = float("nan")
    broken = step.run(kernel, [each.clone() for each in step.caches])
    assert torch.equal(broken[[0, 2, 3]], whole[[0, 2, 3]]) and not broken[1].isfinite().any()


def test_other_steps_are_declined() -> None:
    step, kernel = Step([20, 30], 32, 8, 128, 16), made(32, 8, 128)
    several = replace(step.inputs, max_query_len=2)
    arguments = (step.qkv, step.positions, step.cos_sin, *step.caches)
    assert kernel(*arguments, several, 1.0) is None
    assert kernel(step.qkv[:1], *arguments[1:], step.inputs, 1.0) is None
    assert kernel(step.qkv.transpose(1, 2).contiguous().transpose(1, 2), *arguments[1:], step.inputs, 1.0) is None


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize(
    ("dim", "kv_heads", "kv"),
    [
        (64, 8, None),
        (128, 8, None),
        (128, 32, None),
        (128, 8, "fp8_e4m3"),
        (128, 8, "int8"),
        (128, 32, "int8"),
        (128, 8, "int4"),
    ],
)
def test_layers_one_behind_the_other_in_a_graph(dim: int, kv_heads: int, kv: str | None, pdl: bool) -> None:
    """Products before and behind, which let it begin early: keys of one step are those that the step before wrote. 32
    KV heads: pairs whole."""
    heads, rows, layers = 32, 24, 6
    kernels = Kernels(torch.device("cuda"), techniques=using(programmatic_launch=pdl))
    width, inner = (heads + 2 * kv_heads) * dim, heads * dim
    sites = [
        called("linear", dtype=torch.bfloat16, in_features=ins, out_features=outs)
        for outs, ins in ((width, 2048), (2048, inner))
    ]
    make = [kernels.choose(*site) for site in sites]
    weights = [
        torch.randn(outs, ins, device="cuda").mul_(ins**-0.5).bfloat16()
        for _ in range(layers)
        for outs, ins in ((width, 2048), (2048, inner))
    ]
    products = [make[at % 2](weight, None) for at, weight in enumerate(weights)]
    step = Step([190 + row % 3 for row in range(rows)], heads, kv_heads, dim, 16, kv)
    kernel, x = made(heads, kv_heads, dim, kv, pdl=pdl), torch.randn(rows, 2048, device="cuda").bfloat16()

    def compute(attend: Any, caches: list[list[torch.Tensor]]) -> torch.Tensor:
        inputs, y = replace(step.inputs), x
        for layer in range(layers):
            qkv = products[2 * layer](y).view(rows, -1, dim)
            y = products[2 * layer + 1](
                attend(qkv, step.positions, step.cos_sin, *caches[layer], inputs, dim**-0.5, None, step.quantized).view(
                    rows, -1
                )
            )
        return y

    ours, theirs = ([[each.clone() for each in step.caches] for _ in range(layers)] for _ in range(2))
    want = compute(reference.rope_attention, theirs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute(kernel, ours)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = compute(kernel, ours)
    results = []
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        results.append(got.clone())
    assert float((results[0].float() - want.float()).norm() / want.float().norm()) < (1e-2 if kv is None else 3e-2)
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize(("dim", "kv"), [(64, "auto"), (128, "auto"), (64, "int8"), (128, "fp8"), (128, "int4")])
def test_an_engine_answers_as_without_it(dim: int, kv: str, cascade: bool, tmp_path: Path) -> None:
    """Greedy tokens of requests that come and go, some behind one prefix; where two answers part, both tokens were
    nearly as likely."""
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": dim,
    }
    folder = str(tiny.save("llama", tmp_path, seed=3, max_position_embeddings=2048, **sizes))
    prompts = [{"prompt_token_ids": [(7 * index + each) % 256 for each in range(5 + 9 * index)]} for index in range(8)]
    prompts += [{"prompt_token_ids": [each * each % 251 for each in range(400)] + [index] * 5} for index in range(16)]
    found = []
    for off in ((), (ROPE, ROPE_CASCADE)):
        way = {"dtype": "bfloat16", "max_model_len": 1200, "max_num_seqs": 24, "disabled_kernels": (PERSISTENT, *off)}
        with LLM(folder, **{**STRICT, **way, "cascade_attention": cascade, "kv_cache_dtype": kv}) as llm:
            chosen = [each.value for each in llm.info.decisions if each.name == "kernel rope_attention"]
            assert chosen == ([] if off else [ROPE_CASCADE if cascade else ROPE])
            asked = [params(max_tokens=48 - index, logprobs=2) for index in range(len(prompts))]
            found.append(llm.generate(prompts, asked, use_tqdm=False))
            graphs = runner_of(llm).passes.graphs
            own = graphs is not None and any(Kind.SHARED in each.kinds for each in graphs._captured.values())
            shares = cascade and (kv == "auto" or bool(off))  # the fused kernel reads codes sooner than shares them
            assert own == shares, "steps with shared keys have graphs of their own"
    for one, other in zip(*found, strict=True):
        tokens, scores = one.outputs[0].token_ids, other.outputs[0].logprobs
        for at, (token, wanted) in enumerate(zip(tokens, other.outputs[0].token_ids, strict=True)):
            best = sorted((each.logprob for each in scores[at].values()), reverse=True)
            if token != wanted:
                assert best[0] - best[1] < 0.1 * (1 + (kv != "auto")), at
                break
            apart = abs(one.outputs[0].logprobs[at][token].logprob - scores[at][token].logprob)
            assert apart < 0.1 * (1 + (kv != "auto"))
