"""Which clients are tried, at which versions, and by which tests.

Clients hold each other's packages back, so each group has an environment of its own. To try another version raise it here, run
`python -m tests.clients.run GROUP`, and mend what has changed.

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
    node: bool = False  # what tests/clients/node/package.json names is installed, too
    with_torch: bool = False  # sees the packages of the environment that runs Headrace, torch and transformers among them


RUNNER = ("pytest==9.2.0", "pytest-timeout==2.4.0")  # in every environment

GROUPS = {
    "openai-2": Group(("server/test_openai_client.py", "clients/test_openai.py"), ("openai==2.54.0",), ("openai",)),
    "openai-3": Group(("server/test_openai_client.py", "clients/test_openai.py"), ("openai==3.54.0",), ("openai",)),
    "langchain": Group(
        ("clients/test_langchain.py",),
        ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7", "langgraph==1.2.22"),
    ),
    "litellm": Group(("clients/test_litellm.py",), ("litellm==1.106.2", "mcp==2.3.0")),
    "node": Group(("clients/test_openai_node.py",), node=True),
}
