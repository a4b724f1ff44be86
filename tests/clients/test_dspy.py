"""DSPy: a language model, and programs by its adapters (in text, in JSON, in calls)."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices when it is imported
dspy: Any = pytest.importorskip("dspy", reason=q.ABSENT)


class Served(dspy.LM):  # type: ignore[misc]
    """Its catalogue knows no model of one's own, so it must be told that a schema may be sent."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})


def model(server: Server, **fields: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 200, "cache": False, "num_retries": 0, **fields}
    return Served("openai/demo", api_base=f"{server.url}/v1", api_key="none", **options)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_question_is_answered(demo: Server, kind: str) -> None:
    (answer,) = model(demo, model_type=kind)(q.CAPITAL)
    assert (answer if isinstance(answer, str) else answer["text"]) == q.PARIS


def test_a_program_under_a_schema_fills_its_fields(demo: Server) -> None:
    """Its adapter for JSON asks for a schema with the signature's fields: whatever a small model says, they are there
    and of their types."""
    with dspy.context(lm=model(demo), adapter=dspy.JSONAdapter()):
        made = dspy.Predict("text: str -> name: str, age: int")(text="Henry is 64 years old.")
    assert isinstance(made.name, str) and isinstance(made.age, int)
