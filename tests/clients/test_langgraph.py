"""Loops of agents by LangGraph and by LangChain's `create_agent`: a tool is called, its result is used, and the loop
ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

lc_agents: Any = pytest.importorskip("langchain.agents", reason=q.ABSENT)
structured: Any = pytest.importorskip("langchain.agents.structured_output", reason=q.ABSENT)
lc_tools: Any = pytest.importorskip("langchain_core.tools", reason=q.ABSENT)
lc_openai: Any = pytest.importorskip("langchain_openai", reason=q.ABSENT)
lc_anthropic: Any = pytest.importorskip("langchain_anthropic", reason=q.ABSENT)
prebuilt: Any = pytest.importorskip("langgraph.prebuilt", reason=q.ABSENT)
graph: Any = pytest.importorskip("langgraph.graph", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)

MODELS = ("chat", "responses", "messages")


class Person(pydantic.BaseModel):  # type: ignore[misc]
    """A person."""

    name: str
    age: int


def model(server: Server, kind: str) -> Any:
    common: dict[str, Any] = {"model": "demo", "temperature": 0, "api_key": "none", "max_retries": 0, "timeout": 60}
    if kind == "messages":
        return lc_anthropic.ChatAnthropic(
            base_url=server.url, max_tokens=200, **{**common, "temperature": None}, model_kwargs=SURE
        )
    return lc_openai.ChatOpenAI(base_url=f"{server.url}/v1", use_responses_api=kind == "responses", **common)


SURE = {"extra_body": {"temperature": 0}}  # the client for Anthropic's API takes no temperature any more


@lc_tools.tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Get the current weather for a city"""
    return json.dumps(q.report(city))


def called(messages: list[Any]) -> list[tuple[str, Any]]:
    return [(call["name"], call["args"]) for message in messages for call in getattr(message, "tool_calls", ())]


@pytest.mark.parametrize("kind", MODELS)
def test_an_agent_calls_a_tool_uses_its_result_and_ends(demo: Server, kind: str) -> None:
    agent = lc_agents.create_agent(model(demo, kind), [get_weather])
    messages = agent.invoke({"messages": [("user", q.WEATHER)]})["messages"]
    assert called(messages) == [q.WEATHER_CALL] and messages[-1].text == q.WEATHER_ANSWER
    again = agent.invoke({"messages": [*messages, ("user", "What is the weather in Tokyo?")]})["messages"]
    assert called(again) == [("get_weather", {"city": city}) for city in q.REPORTS] and "Tokyo" in again[-1].text


@pytest.mark.parametrize("kind", MODELS)
def test_calls_side_by_side_and_streamed(demo: Server, kind: str) -> None:
    agent = lc_agents.create_agent(model(demo, kind), [get_weather])
    asked = {"messages": [("user", q.TWO_CITIES)]}
    whole = agent.invoke(asked)["messages"]
    assert called(whole) == [("get_weather", {"city": city}) for city in q.REPORTS]
    pieces = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages") if chunk.type == "AIMessageChunk"]
    assert "".join(chunk.text for chunk in pieces) == "".join(message.text for message in whole if message.type == "ai")


def test_a_graph_of_ones_own(demo: Server) -> None:
    """The ReAct loop as LangGraph's tutorials write it."""
    bound = model(demo, "chat").bind_tools([get_weather])
    builder = graph.StateGraph(graph.MessagesState)
    builder.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    builder.add_node("tools", prebuilt.ToolNode([get_weather]))
    builder.add_edge(graph.START, "model")
    builder.add_conditional_edges("model", prebuilt.tools_condition)
    builder.add_edge("tools", "model")
    messages = builder.compile().invoke({"messages": [("user", q.WEATHER)]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"] and messages[
        -1
    ].content == q.WEATHER_ANSWER


def test_the_server_keeps_the_conversation(demo: Server) -> None:
    llm = model(demo, "responses").model_copy(update={"use_previous_response_id": True})
    messages = lc_agents.create_agent(llm, [get_weather]).invoke({"messages": [("user", q.WEATHER)]})["messages"]
    assert called(messages) == [q.WEATHER_CALL] and messages[-1].text == q.WEATHER_ANSWER


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("strategy", ["ToolStrategy", "ProviderStrategy"])
def test_an_agent_answers_with_an_object(demo: Server, strategy: str, kind: str) -> None:
    form = getattr(structured, strategy)(Person)
    agent = lc_agents.create_agent(model(demo, kind), [], response_format=form)
    assert agent.invoke({"messages": [("user", q.EXTRACT)]})["structured_response"] == Person(**q.PERSON)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_what_the_model_says(demo: Server, method: str, kind: str) -> None:
    made = model(demo, kind).with_structured_output(Person, method=method).invoke(q.EXTRACT)
    assert made == Person(**q.PERSON)
