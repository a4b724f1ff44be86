"""SamplingParams takes what it documents and refuses everything else, by name and in a short message."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import SamplingParams
from headrace.errors import InvalidRequest
from headrace.request import Request, SequenceOutput, StepPlan, StepResult

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs")
LISTS = ("stop", "bad_words", "stop_token_ids", "allowed_token_ids")
BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
NEVER = (
    float("nan"),
    float("inf"),
    -float("inf"),
    10**400,
    -(10**5000),
    1e308,
    True,
    "1",
    b"1",
    [],
    {},
    [10**5000],
    "9" * 10**6,
)


@pytest.mark.parametrize("name", (*NUMBERS, *INTEGERS))
@pytest.mark.parametrize(
    "value", NEVER, ids=lambda value: f"{type(value).__name__}{str(value)[:9] if isinstance(value, float) else ''}"
)
def test_what_is_no_number_in_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name and refused.value.message.startswith(name) and len(refused.value.message) < 250


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", (0, 1, "true", None, []))
def test_only_true_and_false_are_flags(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    "value",
    (
        5,
        1.0,
        {"a": 1},
        [None],
        [[]],
        [True],
        [-1],
        [1.0],
        [""],
        [10**400],
        "x" * 5000,
        ["x" * 5000],
        ["a\ud800"],
        list("x" * 10**6),
    ),
)
def test_what_is_no_list_of_the_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name and len(refused.value.message) < 250


@pytest.mark.parametrize(
    "bias",
    (
        [],
        {"5": 1.0},
        {-1: 1.0},
        {5: "1"},
        {5: None},
        {5: float("nan")},
        {5: 101},
        {True: 1.0},
        dict.fromkeys(range(2000), 1.0),
    ),
)
def test_a_logit_bias_maps_ids_to_numbers(bias: Any) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_bounds_themselves_are_taken() -> None:
    SamplingParams(
        n=128,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=100,
    )
    SamplingParams(
        top_p=5e-324,
        repetition_penalty=5e-324,
        min_p=0,
        seed=-(2**63),
        logprobs=0,
        prompt_logprobs=20,
        max_tokens=1,
        min_tokens=1,
    )
    SamplingParams(
        seed=2**64 - 1,
        logit_bias={0: -100, 2**31 - 1: 100},
        stop="x",
        stop_token_ids=[0],
        allowed_token_ids=[2**31 - 1],
    )


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens is 5.*to 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequest, match="detokenize is false"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(InvalidRequest, match="allowed_token_ids is empty"):
        SamplingParams(allowed_token_ids=[])


def test_what_travels_is_frozen() -> None:
    assert all(noun.__dataclass_params__.frozen for noun in (Request, StepPlan, StepResult))  # type: ignore[attr-defined]
    assert issubclass(SequenceOutput, tuple)
