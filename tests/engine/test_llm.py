"""The offline API over the executor without a model: forms of prompts, order, errors, ends, interrupts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headrace
from headrace import LLM, SamplingParams
from headrace.engine.assembly import create_engine
from headrace.engine.executor import Executor
from headrace.engine.resolve import create_config
from headrace.errors import ConfigError, ContextLengthExceeded, EngineDead, InvalidRequest, ModelError, StepFailed
from headrace.request import StepPlan, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(executor="keyed-hash", max_model_len=256, max_num_seqs=4, num_blocks=64) as made:
        yield made


def used_blocks(llm: LLM) -> int:
    return llm.engine.core.stats().num_used_blocks


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode("Hello there")
    forms: list[Any] = [
        "Hello there",
        {"prompt": "Hello there"},
        {"prompt_token_ids": ids},
        ids,
        {"prompt_token_ids": ids, "cache_salt": "mine"},
    ]
    alone = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms]
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len(set(texts(alone) + texts(together))) == 1
    assert [output.prompt for output in together] == ["Hello there", "Hello there", None, None, None]
    assert all(output.prompt_token_ids == ids and output.finished for output in together)
    assert together[4].num_cached_tokens == 0  # a salt of its own shares with nobody


def test_answers_come_in_the_order_asked_though_they_end_in_another(llm: LLM) -> None:
    lengths = [20, 1, 7, 13, 2, 9]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([[5, n] for n in lengths], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[5, n] for n in lengths]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.metrics is not None and output.metrics.finished is not None for output in outputs)


def test_chat_is_the_template_and_then_generate(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    conversation = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(conversation)
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == prompt and output.prompt_token_ids == tokenizer.encode(prompt, False)
    both = llm.chat([conversation, conversation], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert len(both) == 2 and len(both[0].prompt_token_ids) < len(output.prompt_token_ids)


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        [5],
        [[]],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": "a\ud800"}],
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_a_stream_adds_up_to_the_whole_answer(llm: LLM) -> None:
    (whole,) = llm.generate("Once", GREEDY, use_tqdm=False)
    deltas = list(llm.stream("Once", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [i for delta in deltas for i in delta.token_ids] == whole.outputs[0].token_ids
    assert [delta.last for delta in deltas] == [False] * 5 + [True]


def test_a_stream_left_early_frees_its_blocks(llm: LLM) -> None:
    before, generated = used_blocks(llm), llm.engine.recorder.summary()["generated_tokens"]
    for _ in llm.stream("Once", SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert used_blocks(llm) == before and not llm.engine.core.has_work
    assert llm.engine.recorder.summary()["generated_tokens"] - generated < 5


def test_streams_and_calls_may_interleave(llm: LLM) -> None:
    stream = llm.stream("Once", GREEDY)
    pieces = [next(stream).text]
    middle = llm.generate("Once", GREEDY, use_tqdm=False)
    pieces += [delta.text for delta in stream]
    assert "".join(pieces) == middle[0].outputs[0].text


def test_one_bad_prompt_is_named_and_nothing_runs(llm: LLM) -> None:
    before = llm.engine.core.stats().counters.requests
    with pytest.raises(InvalidRequest, match=r"prompt 1: .*99999.*0 to 8191"):
        llm.generate(["fine", {"prompt_token_ids": [99999]}, "fine"], GREEDY, use_tqdm=False)
    assert llm.engine.core.stats().counters.requests == before and not llm.engine.core.has_work


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ({"prompt_token_ids": []}, {}, "prompt"),
        ({"prompt_token_ids": [-1]}, {}, "prompt"),
        ({"prompt_token_ids": [8192]}, {}, "prompt"),
        ({"prompt_token_ids": [2**40]}, {}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, {}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, {}, "prompt_token_ids"),
        ({"prompt": 5}, {}, "prompt"),
        ({"text": "x"}, {}, "prompt"),
        ({}, {}, "prompt"),
        ({"prompt": "x", "cache_salt": 5}, {}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "\ud800"}, {}, "cache_salt"),
        ({"prompt": "x", "priority": "high"}, {}, "priority"),
        (5, {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1] * 250, {"max_tokens": 7}, "max_tokens"),
        ([1] * 250, {"min_tokens": 7}, "min_tokens"),
        ([1], {"n": 5}, "n"),
        ([1], {"stop_token_ids": [8192]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [8192]}, "allowed_token_ids"),
        ([1], {"allowed_token_ids": [9, 7], "stop_token_ids": [7, 9], "min_tokens": 1}, "allowed_token_ids"),
        ([1], {"logit_bias": {8192: 1.0}}, "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(llm: LLM, prompt: Any, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([prompt] if prompt == [] else prompt, SamplingParams(**params), use_tqdm=False)
    assert refused.value.param == param


def test_prompts_are_cut_to_their_end_where_that_is_asked_for(llm: LLM) -> None:
    long = list(range(5, 400))
    short, fitting = (
        llm.generate([long, [9]], GREEDY, use_tqdm=False, truncate_prompt_tokens=keep) for keep in (7, 250)
    )
    assert [output.prompt_token_ids for output in (*short, *fitting)] == [long[-7:], [9], long[-250:], [9]]
    longest = llm.generate([long], SamplingParams(), use_tqdm=False, truncate_prompt_tokens=-1)
    assert longest[0].prompt_token_ids == long[-255:] and len(longest[0].outputs[0].token_ids) == 1
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is 0; give an integer from 1 to 255"):
        llm.generate([long], GREEDY, use_tqdm=False, truncate_prompt_tokens=0)


def test_the_longest_context_is_named_and_can_be_used_to_the_last_token(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 256 tokens") as refused:
        llm.generate([[1] * 300], GREEDY, use_tqdm=False)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 256 tokens"):
        llm.generate("many words " * 20_000, GREEDY, use_tqdm=False)  # refused without tokenising it whole
    (full,) = llm.generate([[1] * 200], SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    assert len(full.outputs[0].token_ids) == 56 and full.outputs[0].finish_reason == "length"


def test_a_cache_smaller_than_the_context_is_the_limit() -> None:
    with LLM(executor="keyed-hash", max_model_len=256, num_blocks=4) as small:
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 64 tokens"):
            small.generate([[1] * 64], GREEDY, use_tqdm=False)
        assert len(small.generate([[1] * 58], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_defaults_come_from_the_model_and_shrink_to_the_context(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (
        0.7,
        0.9,
        256,
    )  # the bundled model's generation_config.json
    (output,) = llm.generate([[1] * 250], use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 6
    with LLM(executor="keyed-hash", generation_config="headrace") as plain:
        assert plain.get_default_sampling_params() == SamplingParams()


def test_seeds_repeat_with_the_engine_and_differ_between_requests() -> None:
    def seeds(seed: int) -> list[int]:
        seen: list[int] = []
        with LLM(executor="keyed-hash", seed=seed) as llm:
            add = llm.engine.core.add
            llm.engine.core.add = lambda request: (seen.append(request.seed), add(request))[1]  # type: ignore[method-assign]
            llm.generate(["a", "a", "a"], [GREEDY, SamplingParams(seed=-1, max_tokens=1), GREEDY], use_tqdm=False)
        return seen

    first = seeds(3)
    assert first == seeds(3) and first[1] == 2**64 - 1
    assert len({*first, *seeds(4)}) == 5


def test_bad_words_are_banned_at_the_start_and_after_a_space(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    seen: list[tuple[tuple[int, ...], ...]] = []
    add = llm.engine.core.add
    llm.engine.core.add = lambda request: (seen.append(request.bad_word_ids), add(request))[1]  # type: ignore[method-assign]
    try:
        llm.generate("x", SamplingParams(bad_words=["very"], max_tokens=1), use_tqdm=False)
    finally:
        llm.engine.core.add = add  # type: ignore[method-assign]
    assert seen == [(tuple(tokenizer.encode("very", False)), tuple(tokenizer.encode(" very", False)))]


def test_logprobs_belong_to_their_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None and [next(iter(entry)) for entry in answer.logprobs] == answer.token_ids
    assert answer.cumulative_logprob == sum(
        entry[i].logprob for entry, i in zip(answer.logprobs, answer.token_ids, strict=True)
    )
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == [6, 7]


def test_a_stop_string_ends_the_sequence_in_the_core_too(llm: LLM) -> None:
    (free,) = llm.generate("Once", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    text = free.outputs[0].text
    stop = text[10:14]
    (cut,) = llm.generate(
        "Once", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop]), use_tqdm=False
    )
    answer = cut.outputs[0]
    assert (answer.text, answer.stop_reason) == (text[: text.index(stop)], stop)
    assert answer.token_ids == free.outputs[0].token_ids[: len(answer.token_ids)]
    times = cut.metrics
    assert times is not None and None not in (times.first_scheduled, times.first_token, times.finished)
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.finished  # type: ignore[operator]
    assert llm.engine.core.stats().num_running == 0 and not llm.engine.core.has_work


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_cut_at_a_stop_string_is_the_same_with_steps_in_flight(depth: int) -> None:
    """Tokens computed beyond the cut are never seen, whatever was in flight when it was found."""

    def answers(overlap: int) -> list[Any]:
        with LLM(executor="keyed-hash", technique={"overlap": overlap}, max_num_seqs=4) as llm:
            params = SamplingParams(
                temperature=0, max_tokens=30, ignore_eos=True, stop=["a", "e"], min_tokens=2, n=2, logprobs=1, seed=1
            )
            outputs = llm.generate([[n, 5] for n in range(1, 7)], params, use_tqdm=False)
            assert used_blocks(llm) == 0 and not llm.engine.core.has_work, (
                "what is surplus is gone when the answers are there"
            )
            return [output.outputs for output in outputs]

    expected = answers(0)
    assert any(len(each.token_ids) < 10 for pair in expected for each in pair)
    assert answers(depth) == expected


def test_ctrl_c_aborts_and_the_llm_stays_usable() -> None:
    with LLM(executor="keyed-hash", device_time=0.002) as llm:
        before = texts(llm.generate("Once", GREEDY, use_tqdm=False))
        timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3000, ignore_eos=True), use_tqdm=False)
        timer.join()
        stats = llm.engine.core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0) and not llm.engine.core.has_work
        assert texts(llm.generate("Once", GREEDY, use_tqdm=False)) == before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_llm_whose_step_was_interrupted_says_so() -> None:
    """By a handler of an application's own signal, say: what was computed is lost, and nobody waits for it."""

    def interrupt(ticket: Any) -> StepResult:
        raise TimeoutError("alarm")

    with LLM(executor="keyed-hash") as llm:
        llm.engine.core.executor.collect = interrupt  # type: ignore[method-assign]
        with pytest.raises(TimeoutError, match="alarm"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        assert not llm.engine.core.has_work
        with pytest.raises(EngineDead, match="interrupted"):
            llm.generate("c", GREEDY, use_tqdm=False)


class Failing:
    """An executor that fails one step as a whole."""

    def __init__(self, inner: Executor, at: int) -> None:
        self._inner, self._at, self.info = inner, at, inner.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: StepPlan) -> Any:
        self._last = plan
        return self._inner.submit(plan)

    def collect(self, ticket: Any) -> StepResult:
        result = self._inner.collect(ticket)
        if ticket.step_id == self._at:
            raise StepFailed("the device said no")
        return result


def test_a_failed_step_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(config: Any, **_: Any) -> Any:
        return create_engine(config, wrap=lambda executor, recorder: Failing(executor, at=4))  # type: ignore[arg-type,return-value]

    monkeypatch.setattr("headrace.engine.llm.create_engine", failing)
    with LLM(executor="keyed-hash", max_num_seqs=2) as llm:
        outputs = llm.generate(
            [[1], [2], [3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        reasons = [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in outputs]
        assert reasons == [("error", "the device said no")] * 2 + [("length", None)]
        assert used_blocks(llm) == 0


def test_a_missing_tokenizer_is_allowed_with_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.assembly.load_tokenizer", lambda *args, **kwargs: None)
    with LLM(executor="keyed-hash") as llm:
        for detokenize in (False, True):
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=detokenize, logprobs=0)
            answer = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0]
            assert answer.text == "" and len(answer.token_ids) == 4
        for bad, param in (
            (("text", {}), "prompt"),
            (([1], {"stop": ["x"]}), "stop"),
            (([1], {"bad_words": ["x"]}), "bad_words"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                llm.generate(bad[0], SamplingParams(**bad[1]), use_tqdm=False)
            assert refused.value.param == param
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="lora_request is a str; give a LoRARequest"):
            llm.generate([[1]], lora_request="sql", use_tqdm=False)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LLM(max_model_length=5), ConfigError, "did you mean max_model_len"),
        (lambda: LLM(technique={"chunk_prefill": False}), ConfigError, "did you mean chunked_prefill"),
        (lambda: LLM(technique={"max_model_len": 5}), ConfigError, "not a technique"),
        (lambda: LLM(dtype="int3"), ConfigError, "bfloat16"),
        (lambda: LLM("/no/such/model"), ModelError, "/no/such/model"),
    ],
)
def test_a_bad_start_names_the_value_and_the_remedy(
    make: Callable[[], LLM], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_keywords_reach_their_fields(tmp_path: Any) -> None:
    config = create_config(
        tmp_path,
        dtype="float32",
        max_num_seqs=3,
        seed=9,
        served_model_name=["a", "b"],
        technique={"prefix-caching": False, "overlap": 1},
    )
    assert (config.model.model, config.model.dtype, config.model.seed) == (str(tmp_path), "float32", 9)
    assert (config.scheduler.max_num_seqs, config.model.served_model_name) == (3, ("a", "b"))
    assert (config.cache.enable_prefix_caching, config.device.overlap) == (False, 1)


def test_after_shutdown_a_call_says_so() -> None:
    llm = LLM(executor="keyed-hash")
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        llm.generate("x", use_tqdm=False)


def test_progress_reports_to_a_callers_bar(llm: LLM) -> None:
    done: list[int] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            done.append(-total)

        def update(self, n: int = 1) -> None:
            done.append(n)

        def close(self) -> None:
            done.append(0)

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert done == [-2, 1, 1, 0]


def test_every_public_name_is_there() -> None:
    assert all(getattr(headrace, name) is not None for name in headrace.__all__)
    with pytest.raises(AttributeError):
        headrace.NoSuchName  # noqa: B018
