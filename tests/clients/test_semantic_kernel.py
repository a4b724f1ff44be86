"""Semantic Kernel: its connector for chats, its agent with a plug-in, streams and objects."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

pytest.importorskip("semantic_kernel", reason=q.ABSENT)
openai: Any = pytest.importorskip("openai", reason=q.ABSENT)
sk_openai: Any = pytest.importorskip("semantic_kernel.connectors.ai.open_ai", reason=q.ABSENT)
sk_agents: Any = pytest.importorskip("semantic_kernel.agents", reason=q.ABSENT)
sk_functions: Any = pytest.importorskip("semantic_kernel.functions", reason=q.ABSENT)
sk_contents: Any = pytest.importorskip("semantic_kernel.contents", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)


class Person(pydantic.BaseModel):  # type: ignore[misc]
    name: str
    age: int


class Weather:
    """The client joins the names of plug-in and function, and the model keeps to names like those it has learnt: both
    are `weather`."""

    @sk_functions.kernel_function(name="weather", description="Get the current weather for a city")  # type: ignore[untyped-decorator]
    def get_weather(self, city: Annotated[str, "City name"]) -> str:
        return json.dumps(q.report(city))


def service(server: Server) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return sk_openai.OpenAIChatCompletion(ai_model_id="demo", async_client=client)


def history(text: str) -> Any:
    made = sk_contents.ChatHistory()
    made.add_user_message(text)
    return made


def settings(**fields: Any) -> Any:
    return sk_openai.OpenAIChatPromptExecutionSettings(temperature=0, **fields)


def test_a_chat_whole_and_streamed_is_one_answer(demo: Server) -> None:
    async def go() -> tuple[str, str]:
        whole = await service(demo).get_chat_message_content(history(q.CAPITAL), settings())
        pieces = [
            str(piece)
            async for piece in service(demo).get_streaming_chat_message_content(history(q.CAPITAL), settings())
        ]
        return str(whole), "".join(pieces)

    assert asyncio.run(go()) == (q.PARIS, q.PARIS)


def test_an_agent_calls_a_tool_uses_its_result_and_ends(demo: Server) -> None:
    async def go() -> tuple[str, str]:
        arguments = sk_functions.KernelArguments(settings=settings())
        plugins = [sk_functions.KernelPlugin.from_object("weather", Weather())]
        agent = sk_agents.ChatCompletionAgent(
            service=service(demo), name="assistant", plugins=plugins, arguments=arguments
        )
        whole = await agent.get_response(q.WEATHER)
        return str(whole), "".join([str(piece.message) async for piece in agent.invoke_stream(q.WEATHER)])

    whole, streamed = asyncio.run(go())
    assert whole == streamed == q.WEATHER_ANSWER


def test_an_object_is_what_the_model_says(demo: Server) -> None:
    made = asyncio.run(service(demo).get_chat_message_content(history(q.EXTRACT), settings(response_format=Person)))
    assert Person.model_validate_json(str(made)) == Person(**q.PERSON)
