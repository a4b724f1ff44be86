"""Several ranks compute what one does: every family as threads, the engine's modes as processes; and how ranks end."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import headrace.kernels as registry
from headrace import LLM, LoRARequest, SamplingParams
from headrace.config import DeviceConfig
from headrace.errors import ConfigError, EngineDead
from headrace.kernels.candidate import Candidate
from headrace.kernels.linear.packed import activated_linear, packed_fused_linear
from headrace.kernels.linear.reference import fused_linear
from headrace.kernels.sampling.reference import greedy_tokens
from headrace.layers.shared_rows import Sharing
from headrace.models.decoder import Decoder
from headrace.parallel import ranks
from headrace.processes import child
from headrace.spec import DecoderSpec
from tests.support import adapters, modes, quantised, tiny
from tests.support.forward import PagedRun, load_decoder
from tests.support.kernel_cases import carried_out
from tests.support.ranks import Staged, ThreadGroup, load_share, together

STEPS = ({"a": list(range(30)), "b": [7, 8, 9]}, {"a": [3], "b": [4]}, {"a": [5], "b": list(range(40, 52))})
UNSHARED = ("gptq-act-order", "nf4", "nf4-nested")  # by inputs their parts are not stored apart
WHOLE_FORMATS = (  # whose inputs' rounding, if any, does not depend on the split of attention
    "fp8-blocks", "modelopt-fp8", "compressed-w4a16", "compressed-nvfp4", "compressed-mxfp4", "gptq-4", "awq", "stacked",
)  # fmt: skip
SPARSE = ("qwen3-moe", "qwen3-moe-mixed", "mixtral")
EVERY = (*adapters.LLAMA, "embed_tokens", "lm_head")
SHARED = {"sequence_parallel": True, "expert_dispatch": True}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


Steps = list[dict[str, torch.Tensor]]


class Family(NamedTuple):
    """A checkpoint, its decoder, and what that computes."""

    name: str
    folder: Path
    alone: Decoder
    wanted: Steps


def create_family(name: str, folder: Path, **fields: int) -> Family:
    tiny.save(name, folder, tokenizer=False, **fields)
    alone = load_decoder(folder, max_model_len=64)
    return Family(name, folder, alone, steps_of(alone))


@pytest.fixture(scope="module", params=tiny.MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """With tokens that no rank's share divides."""
    return create_family(request.param, tmp_path_factory.mktemp("family"), vocab_size=319)


def steps_of(decoder: Decoder) -> Steps:
    paged = PagedRun(decoder)
    return [paged.step(step, last=index == 1) for index, step in enumerate(STEPS)]


def assert_near(found: Steps, wanted: Steps) -> None:
    for got, want in zip(found, wanted, strict=True):
        for sequence, logits in want.items():
            torch.testing.assert_close(got[sequence], logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_every_family_compute_what_one_does(family: Family, size: int) -> None:
    """With 4 ranks KV heads are copied."""

    def run(group: ThreadGroup) -> Steps:
        decoder = load_share(family.folder, group)
        hidden = torch.randn(5, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(size))
        peaks, tokens = decoder.logits(hidden).max(-1)
        found = decoder.greedy(hidden, greedy_tokens)
        assert torch.equal(found[0], peaks) and torch.equal(found[1], tokens)
        return steps_of(decoder)

    for found in together(size, run):
        assert_near(found, family.wanted)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_rows_out_compute_what_one_does(family: Family, size: int) -> None:
    """Of steps of 5 rows and more, which no number of ranks divides."""

    def run(group: ThreadGroup) -> tuple[Steps, int]:
        return steps_of(load_share(family.folder, group, sharing=Sharing(5))), group.scattered

    for found, scattered in together(size, run):
        assert_near(found, family.wanted)
        assert scattered >= 2 * (2 * family.alone.spec.num_layers - 1)


def folded(size: int, folder: Path) -> tuple[list[Steps], list[tuple[int, int]]]:
    """What each rank computes where products take in what stands around them, by the twins as a GPU's kernels do; and
    how often its sums did, leaving a norm half done or done. The first step has more rows than they take half done."""

    def run(group: ThreadGroup) -> tuple[Steps, tuple[int, int]]:
        return steps_of(load_share(folder, group)), (group.folded, group.normed)

    found, counts = zip(*together(size, run), strict=True)
    return list(found), list(counts)


COPIED = ("llama-biased-mha-tied", "gemma2", "starcoder", "qwen3-moe-mixed")  # by 4 ranks, in every kind of block


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_of_ranks_take_in_what_stands_between_two_products(
    family: Family, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Candidate("planted", lambda site: fused_linear, failure=None)
    monkeypatch.setattr(registry, "OPERATIONS", carried_out("fused_linear", planted))
    composes = load_decoder(family.folder, max_model_len=64).composed(1)[0]
    for count in (size, *((4,) if size == 2 and family.name in COPIED else ())):
        found, counts = folded(count, family.folder)
        sums = 2 * family.alone.spec.num_layers if composes else 0
        assert counts == [(2 * sums, sums)] * count
        for each in found:
            assert_near(each, family.wanted)


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-4", "awq"])
def test_sums_of_ranks_take_in_the_same_of_a_quantised_checkpoint(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quantised.RECIPES[name]
    monkeypatch.setitem(quantised.RECIPES, name, replace(recipe, fields={"head_dim": 32, "intermediate_size": 128}))  # type: ignore[arg-type]
    folder, _ = quantised.write(name, tmp_path)
    wanted, _ = folded(2, folder)
    planted = Candidate("planted", lambda site: packed_fused_linear, failure=None)
    activated = Candidate("planted", lambda site: activated_linear, failure=None)
    operations = {
        **carried_out("packed_fused_linear", planted),
        "activated_linear": carried_out("activated_linear", activated)["activated_linear"],
    }
    monkeypatch.setattr(registry, "OPERATIONS", operations)
    found, counts = folded(2, folder)
    assert min(counts)[0] > 0
    tolerance = 0.15 if recipe.inputs is not None else 2e-4
    for got, want in zip(found[0], wanted[0], strict=True):
        for sequence, logits in want.items():
            assert (got[sequence] - logits).norm() < tolerance * logits.norm()


@pytest.fixture(scope="module", params=SPARSE)
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """With heads that 2, 3 and 4 ranks share."""
    heads = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 12}
    return create_family(request.param, tmp_path_factory.mktemp("sparse"), **heads)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_of_whole_experts_compute_what_one_does(sparse: Family, tmp_path: Path, size: int) -> None:
    """Neighbours together, even where the number does not divide; and with copies, of one expert on every rank."""
    for path in (None, copies(tmp_path, sparse.alone.spec, size)):
        device = DeviceConfig(tensor_parallel_size=size, enable_expert_parallel=True, expert_placement=path)

        def run(group: ThreadGroup, device: DeviceConfig = device) -> Steps:
            return steps_of(load_share(sparse.folder, group, device=device))

        for found in together(size, run):
            assert_near(found, sparse.wanted)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_rows_that_go_to_their_experts_come_back_as_one_rank_says(sparse: Family, tmp_path: Path, size: int) -> None:
    """Of an expert with copies it is not known where a row should go: all ranks compute all rows then."""
    for path in (None, copies(tmp_path, sparse.alone.spec, size)):
        device = DeviceConfig(tensor_parallel_size=size, enable_expert_parallel=True, expert_placement=path)

        def run(group: ThreadGroup, device: DeviceConfig = device) -> tuple[Steps, int]:
            sharing = Sharing(5, dispatched=20)
            return steps_of(load_share(sparse.folder, group, device=device, sharing=sharing)), group.dispatched

        layers = sum(layer.moe is not None for layer in sparse.alone.spec.layers)
        for found, dispatched in together(size, run):
            assert_near(found, sparse.wanted)
            assert dispatched == (2 * layers if path is None else 0)


def copies(folder: Path, spec: DecoderSpec, ranks: int) -> str:
    """A placement with the first expert everywhere, and the second on two ranks."""
    layers = {}
    for index, layer in enumerate(spec.layers):
        if layer.moe is not None:
            held = [[*range(rank, layer.moe.num_experts, ranks)] for rank in range(ranks)]
            layers[index] = [sorted({0, *rank, *((1,) if at == 0 else ())}) for at, rank in enumerate(held)]
    path = folder / "experts.json"
    path.write_text(json.dumps({"experts": layers}), encoding="utf-8")
    return str(path)


def test_stages_of_every_family_compute_what_one_device_does(family: Family) -> None:
    """To the bit, as many stages as there are layers: each tensor of the checkpoint is read by one of them."""
    found = steps_of(Staged(family.folder, family.alone.spec.num_layers))  # type: ignore[arg-type]
    for got, want in zip(found, family.wanted, strict=True):
        assert all(torch.equal(got[sequence], logits) for sequence, logits in want.items())


@pytest.mark.parametrize("name", quantised.RECIPES)
def test_ranks_of_a_quantised_checkpoint_compute_what_one_does_or_say_why_not(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where inputs are rounded, by what one rank has of them: those that are shared out are rounded a little
    differently."""
    recipe = quantised.RECIPES[name]
    monkeypatch.setitem(quantised.RECIPES, name, replace(recipe, fields={"head_dim": 32, "intermediate_size": 128}))  # type: ignore[arg-type]
    folder, _ = quantised.write(name, tmp_path)
    wanted = PagedRun(load_decoder(folder, max_model_len=64)).step(STEPS[0])
    try:
        found = together(2, lambda group: PagedRun(load_share(folder, group)).step(STEPS[0]))
    except ConfigError as error:
        assert name in UNSHARED and "--tensor-parallel-size is 2, but" in error.message
        return
    tolerance = 0.15 if recipe.inputs is not None else 2e-4
    assert name not in UNSHARED
    for sequence, logits in wanted.items():
        assert (found[0][sequence] - logits).norm() < tolerance * logits.norm() and torch.equal(
            found[0][sequence], found[1][sequence]
        )


@pytest.mark.parametrize("name", ["compressed-w4a16", "awq", "gptq-4"])
def test_ranks_multiply_many_rows_by_a_widened_copy(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(quantised.RECIPES[name], fields={"head_dim": 32, "intermediate_size": 128})
    monkeypatch.setitem(quantised.RECIPES, name, recipe)  # type: ignore[arg-type]
    monkeypatch.setattr("headrace.layers.linear.least_rows", lambda *_: 10)
    folder, _ = quantised.write(name, tmp_path)
    wanted = steps_of(load_decoder(folder, max_model_len=64))

    def run(group: ThreadGroup) -> tuple[Steps, int]:
        decoder = load_share(folder, group)
        for each in decoder.linears:
            each.reserve_copy()
            each.fill_copy()
        decoder.use_copies()
        return steps_of(decoder), group.normed

    for found, normed in together(2, run):
        assert_near(found, wanted)
        assert normed == 2 * 3


@pytest.mark.parametrize("name", WHOLE_FORMATS)
def test_ranks_of_whole_experts_in_formats_compute_what_one_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "stacked":
        folder, _ = quantised.write_stacked(tmp_path)
    else:
        recipe = quantised.RECIPES[name]
        gates = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(3)]
        plain = {
            key: [*(recipe.config.get(key) or ()), *gates] for key in ("modules_to_not_convert", "exclude_modules")
        }
        config = {**recipe.config, **(plain if recipe.config["quant_method"] in ("fp8", "modelopt") else {})}
        own = replace(recipe, config=config, fields={"head_dim": 32, "intermediate_size": 128})
        monkeypatch.setitem(quantised.RECIPES, name, own)  # type: ignore[arg-type]
        folder, _ = quantised.write(name, tmp_path, model="mixtral")
    device = DeviceConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    wanted = PagedRun(load_decoder(folder, max_model_len=64)).step(STEPS[0])
    found = together(2, lambda group: PagedRun(load_share(folder, group, device=device)).step(STEPS[0]))
    for sequence, logits in wanted.items():
        torch.testing.assert_close(found[0][sequence], logits, rtol=1e-4, atol=2e-4)


# --- as processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("gemma2", "mixtral"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("seed", range(1))
def test_no_mode_of_two_ranks_changes_an_answer(model: str, oracle: modes.Oracle, seed: int) -> None:
    check(model, oracle, seed, 2)


@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_no_mode_of_two_ranks_of_whole_experts_changes_an_answer(model: str, oracle: modes.Oracle) -> None:
    """To which rows go, of steps of two or more."""
    check(model, oracle, 3, 2, enable_expert_parallel=True, **SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma2", "mixtral", "qwen3-moe-mixed"], indirect=True)
@pytest.mark.parametrize("seed", range(500, 508))
def test_no_mode_of_shared_rows_changes_an_answer_at_length(model: str, oracle: modes.Oracle, seed: int) -> None:
    whole = "gemma2" not in model and seed % 3 > 0
    check(model, oracle, seed, 2 + 2 * (seed % 2), 1 + seed // 4 % 2, enable_expert_parallel=whole, **SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe", "qwen3-moe-mixed"], indirect=True)
@pytest.mark.parametrize("seed", range(300, 308))
def test_no_mode_of_whole_experts_changes_an_answer_at_length(model: str, oracle: modes.Oracle, seed: int) -> None:
    """On two or four ranks, which seed by seed are those of two stages too."""
    check(model, oracle, seed, 2 + 2 * (seed % 2), 1 + seed // 4 % 2, enable_expert_parallel=True)


def test_ranks_of_whole_experts_answer_with_adapters_and_drafts_as_one_does(tmp_path: Path) -> None:
    made = tiny.create("mixtral", seed=3, vocab_size=319)
    made.save_pretrained(tmp_path / "base")
    lora = adapters.write(tmp_path / "one", made, targets=("q_proj", "o_proj"), seed=1)
    asked = [LoRARequest("one"), None]

    def answers(**more: Any) -> list[list[int]]:
        drafts = {"method": "ngram", "num_speculative_tokens": 3}
        keywords = {"lora_modules": [f"one={lora}"], "speculative_config": drafts, **more}
        with ranked(str(tmp_path / "base"), **keywords) as llm:
            found = llm.generate([[5, 9, 200, 31] * 5, [7, 8]], GREEDY, use_tqdm=False, lora_request=asked)
        return [each.outputs[0].token_ids for each in found]

    assert answers(enable_expert_parallel=True) == answers(tensor_parallel_size=1)


@pytest.mark.parametrize("seed", (7,))
def test_no_mode_of_two_stages_changes_an_answer(model: str, oracle: modes.Oracle, seed: int) -> None:
    check(model, oracle, seed, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 220))
def test_no_mode_of_stages_changes_an_answer_at_length(model: str, oracle: modes.Oracle, seed: int) -> None:
    check(model, oracle, seed, 1 + seed % 2, 2 + seed // 2 % 2)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [{"method": "ngram"}, {"method": "suffix"}, {"model": "itself"}])
@pytest.mark.parametrize("seed", range(400, 406))
def test_no_mode_of_drafts_in_stages_changes_an_answer_at_length(
    model: str, oracle: modes.Oracle, seed: int, drafts: dict[str, Any]
) -> None:
    config = {"num_speculative_tokens": 3, **drafts, **({"model": model} if "model" in drafts else {})}
    config |= {} if "model" in drafts else {"prompt_lookup_min": 1}
    check(model, oracle, seed, 1 + seed % 2, 2, speculative_config=config)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, *range(100, 120)))
def test_no_mode_of_ranks_changes_an_answer_at_length(model: str, oracle: modes.Oracle, seed: int) -> None:
    check(model, oracle, seed, 2 + 2 * (seed % 2))


def check(model: str, oracle: modes.Oracle, seed: int, size: int, stages: int = 1, **more: Any) -> None:
    rng = random.Random(seed)
    cases = modes.draw_cases(rng, oracle.vocab_size, 4)
    mode = modes.draw_mode(rng, failing=False)
    mode.keywords |= {"tensor_parallel_size": size, "pipeline_parallel_size": stages, **more}
    mode.keywords["batch_invariant"] &= size == 2 and "sequence_parallel" not in more
    for case, found in zip(cases, modes.run_trial(model, mode, cases, rng, poison=False), strict=True):
        if found is not None:
            modes.compare(found, oracle.answer(case), may_fail=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save("llama", tmp_path_factory.mktemp("llama")))


def ranked(model: str, **more: Any) -> LLM:
    return LLM(model, **{**modes.PLAIN, "num_blocks": 32, "max_num_seqs": 4, "tensor_parallel_size": 2, **more})


def test_ranks_that_wait_for_each_other_are_told_of_and_end(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, where no server watches: the first rank meets the other once more than that one knows of."""
    monkeypatch.setattr(ranks, "STALL", 2)
    with ranked(llama) as llm:
        executor = llm.engine.core.executor
        runner, group = executor._inner._runner, executor._peers.group  # type: ignore[attr-defined]
        submit = runner.submit
        runner.submit = lambda plan: (submit(plan), group.all_reduce(torch.zeros(1)))[0]
        begun = time.monotonic()
        with pytest.raises(
            EngineDead, match=r"step \d+ has not moved for 2 s; collectives so far: rank 0 \d+, rank 1 \d+"
        ):
            llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, use_tqdm=False)
        assert time.monotonic() - begun < 30


def pids(llm: LLM) -> list[int]:
    return [rank.process.pid for rank in llm.engine.core.executor._ranks._ranks]  # type: ignore[attr-defined]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(("running", "overlap"), [(False, 0), (True, 1)])
def test_a_rank_that_is_killed_ends_all_and_is_named(llama: str, overlap: int, running: bool) -> None:
    with ranked(llama, overlap=overlap) as llm:
        (pid,) = pids(llm)
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        collector = (
            llm.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)) if running else None
        )
        if running:
            llm.turn()
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(EngineDead, match=rf"rank 1 \(process {pid}\) was ended by signal 9 \(SIGKILL\)"):
            while collector is None or not collector.finished:
                llm.turn() if collector is not None else llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            llm.turn()
        assert time.monotonic() - begun < 5
    assert gone(pid)


@pytest.mark.parametrize(
    ("family", "targets", "sizes"),
    [
        ("llama", EVERY, (2, 1, 1)),
        ("llama", EVERY, (1, 2, 1)),
        ("llama", EVERY, (1, 1, 2)),
        pytest.param("llama", EVERY, (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("llama", EVERY, (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), (2, 1, 1), marks=pytest.mark.slow),
        pytest.param("gemma2", ("q_proj", "o_proj", "down_proj", "embed_tokens"), (1, 2, 1), marks=pytest.mark.slow),
        pytest.param("gemma2", ("q_proj", "o_proj", "down_proj", "embed_tokens"), (1, 1, 3), marks=pytest.mark.slow),
    ],
)
def test_ranks_answer_with_adapters_as_one_does(
    tmp_path: Path, family: str, targets: tuple[str, ...], sizes: tuple[int, int, int]
) -> None:
    """On several stages or places of the keys, which propose and verify besides. Two prompts have rows enough for all
    places, and a last one that another has computed."""
    made = tiny.create(family, seed=3, vocab_size=319)
    made.save_pretrained(tmp_path / "base")
    modules = [
        f"{name}={adapters.write(tmp_path / name, made, targets=targets, seed=seed)}"
        for seed, name in enumerate(("one", "two"))
    ]
    asked = [LoRARequest("one"), None, LoRARequest("two")]

    def answers(size: int, stages: int, places: int) -> list[list[int]]:
        ranks: dict[str, Any] = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
        ranks["context_parallel_size"] = places
        if stages * places > 1:
            ranks["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
        with ranked(str(tmp_path / "base"), **ranks, lora_modules=modules, max_loras=2) as llm:
            found = [
                llm.generate(
                    [[5, 9, 200, 31], list(range(3, 30)), list(range(20))], GREEDY, use_tqdm=False, lora_request=lora
                )
                for lora in asked
            ]
            found.append(llm.generate([[5, 9, 200, 31]] * 3, GREEDY, use_tqdm=False, lora_request=asked))
        return [each.outputs[0].token_ids for some in found for each in some]

    found = answers(*sizes)
    assert found == answers(1, 1, 1) and len({tuple(each) for each in found[9:]}) == 3


@pytest.mark.parametrize(
    "drafts", [{"method": "ngram", "num_speculative_tokens": 3}, {"model": "itself", "num_speculative_tokens": 2}]
)
def test_ranks_accept_the_drafts_that_one_does(llama: str, drafts: dict[str, Any]) -> None:
    """The draft model is the target: what it proposes is accepted, whichever rank proposes it."""
    config = {**drafts, **({"model": llama} if "model" in drafts else {})}
    prompts = [[7, 8, 9] * 6, [5, 6, 7]]

    def answers(size: int) -> tuple[list[list[int]], Any]:
        with ranked(llama, tensor_parallel_size=size, speculative_config=config) as llm:
            found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
            return [each.outputs[0].token_ids for each in found], llm.engine.core.stats().drafts

    assert answers(2) == answers(1)


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_all_and_is_named(llama: str) -> None:
    with ranked(llama) as llm:
        (pid,) = pids(llm)
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank 1 .* has been silent for 20 s"):
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert time.monotonic() - begun < 30
    assert gone(pid)


@pytest.mark.usefixtures("cold_starts")
def test_a_step_that_fails_on_all_ranks_alike_is_recovered_from(llama: str) -> None:
    """Its requests end; what follows is computed, by ranks that are at the same place. Nothing is left of them once the
    LLM is shut down."""
    with ranked(llama) as llm:
        (pid,) = pids(llm)
        wanted = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        plan_of, executor = llm.engine.core.executor.submit, llm.engine.core.executor
        broken = []

        def submit(plan: Any) -> Any:
            if not broken and plan.rows:
                broken.append(plan)
                plan = replace(
                    plan, copy_group=type(plan.rows)("i", [7]), copy_source=plan.rows[:1], copy_target=plan.rows[:1]
                )  # no such group
            return plan_of(plan)

        executor.submit = submit  # type: ignore[method-assign]
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "error"
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted
        assert not gone(pid)
    assert gone(pid)


def test_a_step_that_fails_on_one_rank_alone_ends_all_and_names_it(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "AGREE_SECONDS", 1.0)
    with ranked(llama) as llm:
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        inner = llm.engine.core.executor._inner  # type: ignore[attr-defined]

        def fail(plan: Any) -> Any:
            raise RuntimeError("planted")

        inner._runner._forward = fail
        begun = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank 1 .* (did not come back|is not where the first is)"):
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert time.monotonic() - begun < 8


def test_what_cannot_be_shared_out_is_said_before_anything_starts(llama: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 3, but 4 attention heads do not divide by 3"):
        ranked(llama, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="--enable-expert-parallel is on, but this model has no experts"):
        ranked(llama, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="--batch-invariant holds for sums of up to 2 ranks"):
        ranked(llama, tensor_parallel_size=4, batch_invariant=True)
    with pytest.raises(ConfigError, match="sequence_parallel is on, but a step of one row"):
        ranked(llama, sequence_parallel=True, batch_invariant=True)
    assert time.monotonic() - begun < 2


def test_a_rank_that_ends_while_it_starts_ends_the_start(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start", lambda module, *rest: child.start("headrace.nowhere", *rest))
    with pytest.raises(EngineDead, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        ranked(llama)
