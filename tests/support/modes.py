"""Random requests, random ways to run an engine, and what must not differ between them.

What lives here: drawing from a seed, running, comparing, poisoned KV blocks, failing steps. What may not: tests, fixed
expectations.

Every block of the KV cache is NaN before it is used and again whenever it is given to somebody new, so that whatever is
read without having been written shows as an unusable row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.cache.block_pool import BlockPool
from headrace.engine.output import OutputCollector
from headrace.errors import HeadraceError
from headrace.kernels.operations import OPERATIONS
from headrace.request import RequestOutput, StructuredOutputs

NATIVE = tuple(sorted({candidate.name for op in OPERATIONS.values() for candidate in op.candidates}))
LONGEST = 120  # tokens of prompt and answer together
STOPS = ("e", "th", "a", " ", "I", "\n", "er", "x", "no")
FAMILIES = (
    "gemma2",
    "starcoder",
    "mixtral",
)  # windows beside full attention; one KV head and learned positions; experts
HAS_GRAMMARS = find_spec("llguidance") is not None  # a bare GPU machine lacks it
GRAMMARS = (
    StructuredOutputs(regex="[a-z ]{1,40}"),
    StructuredOutputs(choice=("one", "two", "twenty")),
    StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "maxItems": 4}),  # type: ignore[arg-type]
)
PLAIN: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": LONGEST}


@dataclass(slots=True)
class Case:
    """One request of a trial. ``arrives``: the turn before which it is submitted. ``leaves``: deltas after which a
    stream is closed."""

    prompt: list[int]
    params: SamplingParams
    arrives: int = 0
    leaves: int | None = None
    priority: int = 0


@dataclass(slots=True)
class Mode:
    """One way to run an engine, as keywords of LLM; and how many steps in a hundred fail."""

    keywords: dict[str, Any] = field(default_factory=dict)
    failing: int = 0


def draw_mode(rng: random.Random, *, failing: bool = True) -> Mode:
    """Tiny caches, odd budgets, and the switches of cache, scheduler and steps either way."""
    block_size = rng.choice((8, 16, 32, 64))
    keywords = {
        "block_size": block_size,
        "num_blocks": -(-LONGEST // block_size) + rng.choice((0, 1, 2, 5, 60)),
        "max_num_seqs": rng.choice((3, 4, 16)),
        "max_num_batched_tokens": rng.choice((1, 5, 7, 13, 33, 256)),
        "max_logits_rows": rng.choice((1, 3, 2048)),
        "overlap": rng.choice((0, 1, 2)),
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "disabled_kernels": rng.choice(((), NATIVE)),
    }
    switches = (
        "prefix_caching", "kv_caching", "token_concatenation", "last_layer_pruning", "paged_allocation", "chunked_prefill", "continuous_batching",
    )  # fmt: skip
    for switch in switches:
        name = "enable_prefix_caching" if switch == "prefix_caching" else switch
        keywords[name] = rng.random() < (0.8 if switch in ("kv_caching", "continuous_batching") else 0.6)
    keywords["batch_invariant"] = not keywords["disabled_kernels"] and rng.random() < 0.2
    return Mode(keywords, rng.choice((0, 0, 0, 5)) if failing else 0)


def draw_cases(rng: random.Random, vocab_size: int, count: int) -> list[Case]:
    """Prompts share beginnings, so that prefixes are found; some streams are left before their end."""
    trunks = [[rng.randrange(vocab_size) for _ in range(70)] for _ in range(2)]
    cases = []
    for _ in range(count):
        trunk = rng.choice(trunks)[: rng.choice((0, 7, 16, 31, 32, 33, 48, 64, 70))]
        prompt = trunk + [rng.randrange(vocab_size) for _ in range(rng.choice((1, 1, 2, 9)))]
        params = draw_params(rng, vocab_size, LONGEST - len(prompt))
        cases.append(
            Case(
                prompt,
                params,
                rng.choice((0, 0, 0, 1, 4, 20)),
                rng.choice((None, None, None, None, 1, 3)),
                rng.choice((0, 0, 1)),
            )
        )
    return cases


def draw_params(rng: random.Random, vocab_size: int, room: int) -> SamplingParams:
    def maybe(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    max_tokens = min(room, rng.choice((1, 2, 8, 17, 30)))
    detokenize = rng.random() < 0.8
    drawn = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0, 1.6)),
        top_p=maybe(0.3, rng.choice((0.5, 0.9)), 1.0),
        top_k=maybe(0.3, rng.choice((1, 4, 50)), 0),
        min_p=maybe(0.2, 0.05, 0.0),
        presence_penalty=maybe(0.2, 0.7, 0.0),
        frequency_penalty=maybe(0.2, 0.4, 0.0),
        repetition_penalty=maybe(0.2, 1.3, 1.0),
        logit_bias=maybe(0.2, {rng.randrange(vocab_size): rng.choice((-5.0, 3.0)) for _ in range(6)}, None),
        allowed_token_ids=maybe(0.15, tuple(rng.sample(range(vocab_size), 60)), None),
        bad_words=maybe(0.2, tuple(rng.sample(STOPS, 2)), ()),
        stop=maybe(0.4, tuple(rng.sample(STOPS, 2)), ()) if detokenize else (),
        stop_token_ids=maybe(0.2, tuple(rng.sample(range(vocab_size), 12)), ()),
        include_stop_str_in_output=rng.random() < 0.3,
        ignore_eos=rng.random() < 0.5,
        min_tokens=min(max_tokens, maybe(0.3, rng.choice((1, 4, 12)), 0)),
        max_tokens=maybe(0.95, max_tokens, None),
        seed=rng.randrange(-(2**63), 2**64),
        logprobs=maybe(0.4, rng.choice((0, 1, 4)), None),
        prompt_logprobs=maybe(0.25, rng.choice((0, 2)), None),
        detokenize=detokenize,
        skip_special_tokens=rng.random() < 0.5,
    )
    grammar = maybe(
        0.25 if HAS_GRAMMARS else 0.0, rng.choice(GRAMMARS), None
    )  # which may leave no token beside these two
    return (
        drawn if grammar is None else replace(drawn, structured_outputs=grammar, allowed_token_ids=None, bad_words=())
    )


def features(mode: Mode, params: SamplingParams) -> dict[str, bool]:
    """What a trial has of what row 17 of the reliability checks names, as far as there is more than one way of it
    here."""
    switches = (
        "enable_prefix_caching", "chunked_prefill", "token_concatenation", "last_layer_pruning", "paged_allocation", "continuous_batching",
        "kv_caching",
    )  # fmt: skip
    return {
        **{name: mode.keywords[name] for name in switches},
        "preemption": mode.keywords["num_blocks"] * mode.keywords["block_size"] < 3 * LONGEST,
        "overlap": mode.keywords["overlap"] > 0,
        "batch_invariant": mode.keywords["batch_invariant"],
        "failing": mode.failing > 0,
        "grammar": params.structured_outputs is not None,
        "penalties": (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0),
        "n": params.n > 1,
        "logprobs": params.logprobs is not None,
        "sampled": params.temperature > 0,
    }


def pair_coverage(trials: Iterable[Mapping[str, bool]]) -> float:
    """How many of all pairs of features, each on or off, some trial has together."""
    seen: set[tuple[tuple[str, bool], ...]] = set()
    names: set[str] = set()
    for trial in trials:
        seen.update(combinations(sorted(trial.items()), 2))
        names.update(trial)
    return len(seen) / (2 * len(names) * (len(names) - 1))


# --- running ----------------------------------------------------------------------------------------------------------


def run_trial(
    model: str | None, mode: Mode, cases: list[Case], rng: random.Random, *, poison: bool = True
) -> list[RequestOutput | None]:
    """All cases together in one engine; None for those that left. The engine must be as it was before when they are
    through."""
    with LLM(model, **{**PLAIN, **mode.keywords}) as llm:
        if poison:
            poison_blocks(llm)
        if mode.failing:
            fail_steps(llm, mode.failing, rng)
        found = answers_of(llm, cases)
        check_at_rest(llm)
    return found


def answers_of(llm: LLM, cases: list[Case]) -> list[RequestOutput | None]:
    collectors: dict[int, OutputCollector] = {}
    turn = 0
    for number, case in sorted(enumerate(cases), key=lambda item: item[1].arrives):
        while turn < case.arrives:
            llm.turn()
            turn += 1
        prompt = {"prompt_token_ids": case.prompt, "priority": case.priority}
        if case.leaves is None:
            collectors[number] = llm.submit(prompt, case.params)
        else:
            _leave_early(llm, prompt, case)
    while not all(collector.finished for collector in collectors.values()):
        assert llm.engine.core.has_work, "requests are waiting, but the engine has nothing to do"
        llm.turn()
        turn += 1
        assert turn < 100_000, "the engine does not come to an end"
    while llm.engine.core.has_work:
        llm.turn()
    return [collectors[number].output() if number in collectors else None for number in range(len(cases))]


def _leave_early(llm: LLM, prompt: Any, case: Case) -> None:
    stream = llm.stream(prompt, case.params)
    for _, _ in zip(range(case.leaves or 0), stream, strict=False):
        pass
    stream.close()


def poison_blocks(llm: LLM) -> None:
    """NaN in every block that nobody has written, from the start and whenever one is handed out or becomes free."""
    caches = llm.engine.core.executor._runner._kv_caches  # type: ignore[attr-defined]
    for pool, cache in zip(llm.engine.core.scheduler.cache.pools, caches, strict=True):
        cache.fill_(float("nan"))
        _poison_pool(pool, cache)


def _poison_pool(pool: BlockPool, cache: Any) -> None:
    allocate, release = pool.allocate, pool.release

    def allocate_poisoned() -> int:
        block = allocate()
        cache[block] = float("nan")
        return block

    def release_poisoned(block: int) -> None:
        release(block)
        if pool.references(block) == 0 and not pool.is_cached(block):
            cache[block] = float("nan")

    pool.allocate, pool.release = allocate_poisoned, release_poisoned  # type: ignore[method-assign]


def fail_steps(llm: LLM, percent: int, rng: random.Random) -> None:
    """Some steps run out of memory: before anything is touched, with keys and values written, or with tokens in their
    rows."""
    runner = llm.engine.core.executor._runner  # type: ignore[attr-defined]
    for part in ("_forward", "_sample", "_read") if percent else ():
        setattr(runner, part, _failing(getattr(runner, part), percent / 3, rng))


def _failing(work: Callable[..., Any], percent: float, rng: random.Random) -> Callable[..., Any]:
    def work_or_fail(*step: Any) -> Any:
        if rng.random() * 100 < percent:
            raise MemoryError("on purpose")
        return work(*step)

    return work_or_fail


def check_at_rest(llm: LLM) -> None:
    """Nothing is held once nobody is served."""
    core = llm.engine.core
    roster, stats = core.scheduler.roster, core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert sorted(roster.free_rows) == list(range(core.scheduler.limits.max_num_seqs))
    assert (list(roster.requests), core.scheduler.cache.num_leaving) == ([], 0)
    assert llm._outputs.num_live == 0 and not llm._sinks


# --- comparing --------------------------------------------------------------------------------------------------------


class Oracle:
    """Each request by itself, on torch twins, computed whole: nothing shared, nothing cut, nothing in flight."""

    def __init__(self, model: str | None) -> None:
        sizes = {"max_num_seqs": 4, "num_blocks": 64, "max_num_batched_tokens": 256}
        self._llm = LLM(model, **PLAIN, **sizes, disabled_kernels=NATIVE, enable_prefix_caching=False)
        self.vocab_size = self._llm.info.vocab_size

    def answer(self, case: Case) -> RequestOutput | HeadraceError:
        return self._llm.generate(case.prompt, case.params, use_tqdm=False)[0]

    def close(self) -> None:
        self._llm.shutdown()


def compare(found: RequestOutput, wanted: RequestOutput, *, may_fail: bool, tolerance: float = 1e-4) -> None:
    """Tokens, texts and ends are the same, logprobs within ``tolerance``. An answer whose step failed is a beginning of
    the wanted one."""
    for got, want in zip(found.outputs, wanted.outputs, strict=True):
        if may_fail and got.finish_reason == "error" and want.finish_reason != "error":
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            assert want.text.startswith(got.text.rstrip("\N{REPLACEMENT CHARACTER}"))
            continue
        assert got.token_ids == want.token_ids
        assert (got.text, got.finish_reason, got.stop_reason) == (want.text, want.finish_reason, want.stop_reason)
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=10 * tolerance)
        _compare_logprobs(got.logprobs, want.logprobs, tolerance)
    if not (may_fail and any(each.finish_reason == "error" for each in found.outputs)):
        _compare_logprobs(found.prompt_logprobs, wanted.prompt_logprobs, tolerance)


def _compare_logprobs(found: Any, wanted: Any, tolerance: float) -> None:
    assert (found is None) == (wanted is None)
    for got, want in zip(found or (), wanted or (), strict=True):
        if got is None or want is None:
            assert got is want
            continue
        assert next(iter(got)) == next(iter(want))
        assert [each.logprob for each in got.values()] == pytest.approx(
            [each.logprob for each in want.values()], abs=tolerance
        )
