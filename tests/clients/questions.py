"""What the clients ask: questions whose answers the bundled model has learnt, so that a test can say what the user
meant.

What lives here: questions, tools and what must come of them. What may not: anything of one client.
"""

from __future__ import annotations

from typing import Any

ABSENT = "not installed here; `python -m tests.clients.run` makes an environment for each client"

SCRIPTED = 1010  # the seed by which the scripted server (tests/server/fake_engine.py) says what stands between ⟦ and ⟧

CAPITAL, PARIS = "What is the capital of France?", "The capital of France is Paris."

# One tool, what it is called with, and what the model makes of its result.
WEATHER = "What is the weather in Rome?"
WEATHER_CALL = ("get_weather", {"city": "Rome"})
WEATHER_ANSWER = "It is rainy in Rome with a temperature of 4 degrees."
TWO_CITIES = "What is the weather in Rome and Tokyo?"
REPORTS: dict[str, dict[str, Any]] = {
    "Rome": {"city": "Rome", "temperature": 4, "condition": "rainy"},
    "Tokyo": {"city": "Tokyo", "temperature": 24, "condition": "sunny"},
}
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "City name"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": WEATHER_SCHEMA,
    },
}

# Structured output: without any constraint the model writes PERSON, so under a schema that admits it it must write the
# same.
EXTRACT = "Henry is 64 years old. Return this as JSON with the keys name and age."
PERSON = {"name": "Henry", "age": 64}
PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def report(city: str) -> dict[str, Any]:
    """What the tool returns; KeyError for a city that nobody asked for."""
    return REPORTS[city]
