"""Which clients are tried, at which versions, and by which tests.

Clients hold each other's packages back, so each group has an environment of its own. To try another version raise it
here, run `python -m tests.clients.run GROUP`, and mend what has changed.

What lives here: the table. What may not: how environments are made (run.py), what is asked (test_*.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Clients that live together."""

    tests: tuple[str, ...]  # files below tests/
    clients: tuple[str, ...] = ()  # requirements, each of one version; the first is what the table shows
    sections: tuple[str, ...] = ()  # of docs/clients.md, whose examples are run here
    npm: tuple[str, ...] = ()  # likewise, for Node; the programs of tests/clients/node are put beside them
    with_torch: bool = (
        False  # sees the packages of the environment that runs Headrace, torch and transformers among them
    )


RUNNER = ("pytest==9.2.0", "pytest-timeout==2.4.0")  # in every environment

GROUPS = {
    "openai-2": Group(("server/test_openai_client.py", "clients/test_openai.py"), ("openai==2.54.0",), ("openai",)),
    "openai-3": Group(("server/test_openai_client.py", "clients/test_openai.py"), ("openai==3.54.0",), ("openai",)),
    "anthropic": Group(
        ("server/test_api_clients.py", "clients/test_anthropic.py"),
        ("anthropic==2.12.0", "openai==3.54.0"),
        ("anthropic",),
    ),
    "litellm": Group(("clients/test_litellm.py",), ("litellm==1.106.2", "mcp==2.3.0"), ("LiteLLM",)),
    "langchain": Group(
        ("clients/test_langchain.py", "clients/test_langgraph.py"),
        ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7", "langgraph==1.2.22"),
        ("LangChain and LangGraph",),
    ),
    "llama-index": Group(
        ("clients/test_llama_index.py",),
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
        ("LlamaIndex",),
    ),
    "instructor": Group(("clients/test_instructor.py",), ("instructor[anthropic]==1.17.0",), ("instructor",)),
    "pydantic-ai": Group(
        ("clients/test_pydantic_ai.py",), ("pydantic-ai-slim[openai,anthropic]==2.68.0",), ("Pydantic AI",)
    ),
    "openai-agents": Group(("clients/test_openai_agents.py",), ("openai-agents==0.24.0",), ("OpenAI Agents SDK",)),
    "haystack": Group(("clients/test_haystack.py",), ("haystack-ai==3.4.0",), ("Haystack",)),
    "semantic-kernel": Group(("clients/test_semantic_kernel.py",), ("semantic-kernel==1.45.0",), ("Semantic Kernel",)),
    "dspy": Group(("clients/test_dspy.py",), ("dspy==3.4.1",), ("DSPy",)),
    "openai-node": Group(("clients/test_openai_node.py",), npm=("openai@7.57.0",), sections=("openai for Node",)),
    "ai-sdk": Group(
        ("clients/test_ai_sdk.py",),
        npm=(
            "ai@6.0.325",
            "@ai-sdk/openai-compatible@2.0.92",
            "@ai-sdk/openai@3.0.141",
            "@ai-sdk/anthropic@3.0.140",
            "zod@4.6.7",
        ),
        sections=("AI SDK",),
    ),
    "lm-eval": Group(("clients/test_lm_eval.py",), ("lm-eval[api]==0.4.13",), with_torch=True),
    "guidellm": Group(("clients/test_guidellm.py",), ("guidellm==0.8.1",), with_torch=True),
}
