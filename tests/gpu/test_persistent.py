"""All layers in one launch, on the card, against the twin in float32: hidden states, the cache it writes, the bits of
repeats and of graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace import LLM
from headrace.kernels import NOBODY, Kernels
from headrace.kernels.attention import kv_codes
from headrace.kernels.candidate import EightBits
from headrace.kernels.inputs import AttentionInputs, ForwardInputs, Quantized
from headrace.kernels.step.candidates import PERSISTENT
from headrace.kernels.step.reference import StepWeights, WholeStep, decode_step, longest_context
from headrace.spec import DecoderSpec, LayerSpec, RopeSpec
from tests.support import tiny
from tests.support.card import STRICT, params, require_card
from tests.support.kernel_cases import called, using
from tests.support.quantized_kv import shared_scales
from tests.support.specs import LLAMA_1B

require_card()

CUDA = torch.device("cuda")
VOCAB, LONGEST = 300, 6000
BASE = replace(LLAMA_1B, vocab_size=VOCAB, layers=(LayerSpec(),) * 3, max_positions=LONGEST)
SPECS = {
    "heads of 64": BASE,
    "heads of 128": replace(
        BASE,
        hidden_size=4096,
        head_dim=128,
        intermediate_size=14336,
        rope=RopeSpec(5e5, 128),
        attention_scale=128**-0.5,
    ),
    "groups of 3": replace(
        BASE, hidden_size=3072, num_heads=24, head_dim=128, rope=RopeSpec(5e5, 128), attention_scale=128**-0.5
    ),
    "no groups": replace(BASE, num_kv_heads=32, intermediate_size=5632),
}
CONTEXTS = {
    "one": [192],
    "first token": [1],
    "three": [1, 17, 300],
    "uneven": [1, 17, 300, 1024, 64, 128, 129, 1000],
    "in parts": [2500, 7, 2000],
    "padded": [5, 0, 700, 0],
    "long": [5900],
    "ends of parts": [256, 257, 255, 512, 16, 15, 128, 127],
    "ends of items": [511, 512, 513, 640, 768, 769],
}


CHAINS = {  # of each sequence: keys that its last token sees, tokens
    "drafts of one": [(197, 5)],
    "of its first tokens": [(4, 4)],
    "of two": [(100, 3), (41, 2)],
    "one after another": [(100, 1), (101, 1), (103, 2)],
    "over a block's end": [(130, 6), (64, 2)],
    "over an item's end": [(514, 4), (769, 2)],
    "in parts": [(2561, 3)],
    "padded": [(19, 4), (0, 1), (33, 1)],
    "eight": [(300, 8)],
}


def turns(dim: int) -> Tensor:
    angles = torch.arange(LONGEST, device=CUDA).unsqueeze(1) * 500000.0 ** (
        -torch.arange(dim // 2, device=CUDA) / (dim // 2)
    )
    table: Tensor = torch.cat((angles.cos(), angles.sin()), 1)
    return table


def random_weights(spec: DecoderSpec, *, fp8: bool = False, kv: str | None = None) -> StepWeights:
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    shapes = (
        ((spec.num_heads + 2 * spec.num_kv_heads) * dim, hidden),
        (hidden, spec.num_heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
    )

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, device=CUDA) * shape[-1] ** -0.5).bfloat16()

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(hidden, device=CUDA)).bfloat16()

    def scale(outs: int, ins: int) -> Tensor:
        return (torch.rand(outs, device=CUDA) + 0.5) * ins**-0.5

    def codes(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA).to(torch.float8_e4m3fn)

    make = codes if fp8 else weight
    layers = tuple((*(make(*shape) for shape in shapes), norm(), norm()) for _ in spec.layers)
    scales = tuple(tuple(scale(*shape) for shape in shapes) for _ in spec.layers) if fp8 else ()
    table = torch.randn(VOCAB, hidden, device=CUDA).bfloat16()
    held = () if kv is None else tuple(on_card(shared_scales(kv, spec.num_kv_heads)) for _ in spec.layers)
    facts = spec.qkv_heads, spec.norm_eps, spec.attention_scale
    return StepWeights(layers, table, norm(), table, turns(dim), *facts, scales, held)


def on_card(held: Quantized) -> Quantized:
    k, v = (None if each is None else each.to(CUDA) for each in (held.k_scales, held.v_scales))
    return replace(held, k_scales=k, v_scales=v)


def as_codes(cache: Tensor, held: Quantized) -> Tensor:
    """As the engine holds [blocks, layers, 2, kv_heads, block_size, head_dim], keys and values by the keys' scales."""
    codes, scales = kv_codes.encode(cache.transpose(3, 4).flatten(0, 3), held.format, held.k_scales)
    parts = [codes] if scales is None else [codes, scales.view(torch.uint8)]
    blocks = [
        part.view(*cache.shape[:3], cache.shape[4], cache.shape[3], -1).transpose(3, 4).flatten(4) for part in parts
    ]
    return torch.cat(blocks, -1).view(*cache.shape[:5], -1)


def as_floats(cache: Tensor, held: Quantized | None, dim: int) -> Tensor:
    if held is None:
        return cache.float()
    size, flat = cache.shape[4], cache.flatten(0, 2)
    places = torch.arange(len(flat) * size, device=CUDA)
    return kv_codes.read(flat, places // size, places % size, dim, held.format, None)


def wide(weights: StepWeights) -> StepWeights:
    plain = replace(weights, embedding=weights.embedding.float(), norm=weights.norm.float())
    layers = tuple(tuple(each.float() for each in plain.wide(index)) for index in range(len(weights.layers)))
    return replace(plain, layers=layers, scales=())


def random_step(spec: DecoderSpec, contexts: list[int], block_size: int) -> tuple[ForwardInputs, Tensor]:
    """Blocks in any order; what nobody may read is NaN."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 1).int()
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    cache = torch.randn(
        len(order), spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim, device=CUDA
    ).bfloat16()
    slots, used = [], 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        last, offset = (int(table[row, count - 1]), (context - 1) % block_size) if context else (0, 0)
        slots.append(last * block_size + offset if context else -1)
        if context:
            cache[last, :, :, :, offset:] = float("nan")
    every, places = torch.arange(len(contexts) + 1, dtype=torch.int32), [max(context - 1, 0) for context in contexts]
    attention = AttentionInputs(
        table.to(CUDA), every.to(CUDA), torch.tensor(contexts, dtype=torch.int32, device=CUDA), torch.tensor(slots, device=CUDA),
        block_size, 1, max(contexts),
    )  # fmt: skip
    return ForwardInputs(
        torch.randint(VOCAB, (len(contexts),), device=CUDA), torch.tensor(places, device=CUDA), (attention,)
    ), cache


def chained_step(spec: DecoderSpec, chains: list[tuple[int, int]], block_size: int) -> tuple[ForwardInputs, Tensor]:
    """Each token a row: those of a sequence see each other's keys, which are NaN until they are written."""
    inputs, cache = random_step(spec, [context for context, _ in chains], block_size)
    seen, device = inputs.attention[0], CUDA
    row = torch.tensor([at for at, (_, count) in enumerate(chains) for _ in range(count)], device=device)
    back = torch.tensor([behind for _, count in chains for behind in reversed(range(count))], device=device)
    context, place = seen.context_len[row] - back.int(), (inputs.positions[row] - back).clamp(min=0)
    table = seen.block_table[row]
    slots = table.gather(1, (place // block_size)[:, None])[:, 0] * block_size + place % block_size
    slots = torch.where(context > 0, slots, -1)
    for slot in slots[slots >= 0].tolist():
        cache[slot // block_size, :, :, :, slot % block_size] = float("nan")
    every = torch.arange(len(row) + 1, dtype=torch.int32, device=device)
    attention = replace(seen, block_table=table, query_start=every, context_len=context, slots=slots, chained=True)
    return ForwardInputs(torch.randint(VOCAB, (len(row),), device=device), place, (attention,)), cache


def persistent(spec: DecoderSpec, weights: StepWeights, *, pdl: bool = False) -> WholeStep:
    eight = EightBits("fp8") if weights.scales else None
    kv = weights.quantized[0].format if weights.quantized else None
    kernels = Kernels(CUDA, techniques=using(programmatic_launch=pdl, persistent_fp8=True))
    make = kernels.offer(*called("decode_step", dtype=torch.bfloat16, spec=spec, eight=eight, kv=kv))
    assert make is not None
    step: WholeStep = make(weights)
    return step


def far(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize(
    ("fp8", "kv"), [(False, None), (True, None), (False, "int8"), (True, "fp8_e4m3"), (False, "fp8_e5m2")], ids=str
)
@pytest.mark.parametrize("name", SPECS)
def test_hidden_states_and_the_cache_are_the_twin_s(name: str, fp8: bool, kv: str | None) -> None:
    torch.manual_seed(len(name))
    spec = SPECS[name]
    weights = random_weights(spec, fp8=fp8, kv=kv)
    held = weights.quantized[0] if weights.quantized else None
    near = 1 if held is None else 3  # a newest key's codes are those of what bfloat16 made of it
    step, twin = persistent(spec, weights), decode_step(wide(weights))
    for block_size in (16, 128):
        for contexts in CONTEXTS.values():
            inputs, cache = random_step(spec, contexts, block_size)
            cache = cache if held is None else as_codes(cache, held)
            expected = cache.float() if held is None else cache.clone()
            want = twin(inputs, (expected,))
            got = step(inputs, (cache,))
            assert got is not None and want is not None
            live = [row for row, context in enumerate(contexts) if context]
            assert far(got[live], want[live]) < near * 2e-2, contexts
            assert not got[[row for row in range(len(contexts)) if row not in live]].any()
            found, meant = (as_floats(each, held, spec.head_dim) for each in (cache, expected))
            assert far(found.nan_to_num(), meant.nan_to_num()) < near * 1e-2
            assert torch.equal(found.isnan(), meant.isnan())  # it wrote where it should, and nowhere else


@pytest.mark.parametrize("name", SPECS)
def test_tokens_of_one_sequence_see_each_other(name: str) -> None:
    torch.manual_seed(len(name))
    spec = SPECS[name]
    weights = random_weights(spec)
    step, twin = persistent(spec, weights), decode_step(wide(weights))
    for block_size in (16, 128):
        for chains in CHAINS.values():
            inputs, cache = chained_step(spec, chains, block_size)
            expected, first = cache.float(), cache.clone()
            want = twin(inputs, (expected,))
            got, again = step(inputs, (cache,)), step(inputs, (first,))
            assert got is not None and want is not None and again is not None
            live = inputs.attention[0].context_len > 0
            assert far(got[live], want[live]) < 2e-2, chains
            assert not got[~live].any() and torch.equal(got, again)
            assert far(cache.nan_to_num(), expected.nan_to_num()) < 1e-2
            assert torch.equal(cache.isnan(), expected.isnan())


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "FP8"])
def test_repeats_and_graphs_have_the_same_bits(fp8: bool) -> None:
    torch.manual_seed(3)
    weights = random_weights(BASE, fp8=fp8)
    step = persistent(BASE, weights)
    inputs, cache = random_step(BASE, CONTEXTS["uneven"], 128)
    first = step(inputs, (cache,))
    assert first is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs, (cache,))
    assert captured is not None
    for _ in range(50):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, first)


def test_steps_that_begin_while_the_one_before_runs_have_the_same_bits() -> None:
    """One behind the other, of different rows: a launch finds the memory in which programs meet as it wants it, and no
    value of the one before."""
    torch.manual_seed(4)
    weights = random_weights(BASE)
    plain, early = persistent(BASE, weights), persistent(BASE, weights, pdl=True)
    steps = [random_step(BASE, CONTEXTS[name], 128) for name in ("uneven", "one", "three", "in parts")]
    wanted = [plain(inputs, (cache,)) for inputs, cache in steps]
    graph = torch.cuda.CUDAGraph()
    for inputs, cache in steps:
        early(inputs, (cache,))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [early(inputs, (cache,)) for inputs, cache in steps for _ in range(3)]
    for _ in range(50):
        for each in captured:
            assert each is not None
            each.fill_(float("nan"))
        graph.replay()
        for index, each in enumerate(captured):
            want = wanted[index // 3]
            assert each is not None and want is not None and torch.equal(each, want)


def test_steps_that_are_not_for_it_are_declined() -> None:
    weights = random_weights(BASE)
    step = persistent(BASE, weights)
    inputs, cache = random_step(BASE, [3] * 9, 16)
    assert step(inputs, (cache,)) is None
    inputs, cache = random_step(BASE, [3], 8)
    assert step(inputs, (cache,)) is None
    inputs, cache = random_step(BASE, [3, 4097], 16)
    assert step(inputs, (cache,)) is None


def test_a_row_that_is_not_a_number_spoils_no_other() -> None:
    torch.manual_seed(5)
    weights = random_weights(BASE)
    step = persistent(BASE, weights)
    inputs, cache = random_step(BASE, [40, 50, 60], 16)
    whole = step(inputs, (cache.clone(),))
    weights.embedding[int(inputs.token_ids[1])] = float("nan")
    spoiled = step(inputs, (cache,))
    assert whole is not None and spoiled is not None
    assert spoiled[1].isnan().all() and torch.equal(spoiled[[0, 2]], whole[[0, 2]])


SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


def test_an_engine_answers_the_same_whether_or_not_kernels_begin_early(tmp_path: Path) -> None:
    """Whole steps, their head and what stands around them, one behind the other; some rows come and go, some draw."""
    folder = str(tiny.save("llama", tmp_path, seed=4, **SIZES))
    prompts = [
        {"prompt_token_ids": [(5 * index + 3 * each) % 256 for each in range(4 + 7 * index)]} for index in range(7)
    ]
    asked = [params(max_tokens=60 - 7 * index, temperature=0.8 if index == 5 else 0.0, seed=1) for index in range(7)]
    answers = []
    for early in (True, False):
        with LLM(folder, **{**STRICT, "dtype": "bfloat16", "max_model_len": 1200, "programmatic_launch": early}) as llm:
            together = [each.outputs[0].token_ids for each in llm.generate(prompts, asked, use_tqdm=False)]
            alone = [
                llm.generate(prompt, params(max_tokens=40), use_tqdm=False)[0].outputs[0].token_ids
                for prompt in prompts[:2]
            ]
            answers.append((together, alone))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_an_engine_answers_as_without_it(kv: str, tmp_path: Path) -> None:
    """Greedy tokens of few requests, which come and go, one across the longest context of such a step; where two
    answers part, both tokens were nearly as likely."""
    folder = str(tiny.save("llama", tmp_path, seed=3, **SIZES))
    prompts = [{"prompt_token_ids": [(7 * index + each) % 256 for each in range(5 + 9 * index)]} for index in range(5)]
    prompts[0] = {"prompt_token_ids": [each * each % 251 for each in range(longest_context(8) - 7)]}
    answers = []
    for way in ({}, {"disabled_kernels": (PERSISTENT,)}):
        with LLM(folder, **{**STRICT, "dtype": "bfloat16", "max_model_len": 1200, "kv_cache_dtype": kv, **way}) as llm:
            chosen = [each.value for each in llm.info.decisions if each.name == "kernel decode_step"]
            assert chosen == ([NOBODY] if way else [PERSISTENT])
            answers.append(
                llm.generate(
                    prompts, [params(max_tokens=48 - 9 * index, logprobs=2) for index in range(5)], use_tqdm=False
                )
            )
    for one, other in zip(*answers, strict=True):
        tokens, scores = one.outputs[0].token_ids, other.outputs[0].logprobs
        for at, (token, wanted) in enumerate(zip(tokens, other.outputs[0].token_ids, strict=True)):
            best = sorted((each.logprob for each in scores[at].values()), reverse=True)
            if token != wanted:
                assert best[0] - best[1] < 0.1 * (1 + (kv != "auto")), at
                break
            apart = abs(one.outputs[0].logprobs[at][token].logprob - scores[at][token].logprob)
            assert apart < 0.1 * (1 + (kv != "auto"))
