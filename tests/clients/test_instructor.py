"""instructor in every mode that servers of OpenAI's and Anthropic's APIs are asked in: what is made is what was
meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

instructor: Any = pytest.importorskip("instructor", reason=q.ABSENT)
instructor_errors: Any = pytest.importorskip("instructor.core", reason=q.ABSENT)
openai: Any = pytest.importorskip("openai", reason=q.ABSENT)
anthropic: Any = pytest.importorskip("anthropic", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)

OPENAI = ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"]
ANTHROPIC = ["ANTHROPIC_TOOLS", "ANTHROPIC_JSON"]
HENRY = [{"role": "user", "content": q.EXTRACT}]


class Person(pydantic.BaseModel):  # type: ignore[misc]
    """A person"""

    name: str
    age: int


class Weather(pydantic.BaseModel):  # type: ignore[misc]
    """Get the current weather for a city"""

    city: str


class Refused(Person):
    """A person"""

    @pydantic.field_validator("age")  # type: ignore[untyped-decorator]
    @classmethod
    def too_young(cls, age: int) -> int:
        raise ValueError(f"{age} is too young")


def made(server: Server, mode: str, **fields: Any) -> Any:
    kind = instructor.Mode[mode]
    if mode.startswith("ANTHROPIC"):
        client = instructor.from_anthropic(
            anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0), mode=kind
        )
        return client.create(model="demo", max_tokens=200, **SURE, **{"max_retries": 0, **fields})
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0), mode=kind
    )
    return client.create(model="demo", temperature=0, **{"max_retries": 0, **fields})


SURE: dict[str, Any] = {"extra_body": {"temperature": 0}}


@pytest.mark.parametrize("mode", OPENAI + ANTHROPIC)
def test_an_object_is_what_was_meant(demo: Server, mode: str) -> None:
    assert made(demo, mode, messages=HENRY, response_model=Person).model_dump() == q.PERSON


def test_a_block_of_json_in_the_text(demo: Server) -> None:
    """MD_JSON holds the model to nothing and explains at length, so the small model is asked for one field."""

    class Age(pydantic.BaseModel):  # type: ignore[misc]
        age: int

    asked = [{"role": "user", "content": "Henry is 64 years old. Extract age as JSON."}]
    assert made(demo, "MD_JSON", messages=asked, response_model=Age).model_dump() == {"age": q.PERSON["age"]}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON", "ANTHROPIC_TOOLS"])
def test_a_streamed_object_grows_to_the_whole_one(demo: Server, mode: str) -> None:
    partial = list(made(demo, mode, messages=HENRY, response_model=instructor.Partial[Person], stream=True))
    assert partial[-1].model_dump() == q.PERSON and len(partial) > 2


@pytest.mark.parametrize("mode", ["PARALLEL_TOOLS", "ANTHROPIC_PARALLEL_TOOLS"])
def test_calls_side_by_side(demo: Server, mode: str) -> None:
    found = list(
        made(demo, mode, messages=[{"role": "user", "content": q.TWO_CITIES}], response_model=Iterable[Weather])
    )
    assert [each.city for each in found] == list(q.REPORTS)


@pytest.mark.parametrize("mode", OPENAI + ANTHROPIC)
def test_what_was_wrong_is_sent_back(demo: Server, mode: str) -> None:
    """The server takes the refused answer, and what was wrong with it, in the shape that each mode gives them.

    What the small model makes of that is its own affair: it may go on until its answer is cut.
    """
    with pytest.raises(instructor_errors.InstructorError) as caught:
        made(demo, mode, messages=HENRY, response_model=Refused, max_retries=2)
    if isinstance(caught.value, instructor_errors.IncompleteOutputException):
        return
    first, *others = [attempt.exception for attempt in caught.value.failed_attempts]
    assert "64 is too young" in str(first)
    assert others and not [each for each in others if isinstance(each, openai.APIError | anthropic.APIError)]
