"""The process that renders chat templates. A template comes with a model, so it is a stranger's program: it runs
here, in Jinja's sandbox, without the environment's secrets, with bounded memory, under a timer that the kernel
enforces.

What lives here: rendering, its limits, and the functions templates may call.
What may not: imports of anything heavy (it must start fast), state between renders other than compiled templates.

Started as ``python -S -P -m headrace.engine.template_worker``; ends with its stdin.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.portability import limit
from headrace.processes.sandbox import answer_lines

MEMORY_BYTES = 512 * 2**20  # of address space, far above what the interpreter and any honest render need


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the model said, for training; here it only renders its
    body."""

    tags = {"generation"}  # noqa: RUF012 - the base class says a set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class OutputTooLong(Exception):
    """A render went over its limit of bytes."""


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Operators go through the sandbox, which keeps the compiler from computing ``'a' * 10**9`` where it stands."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})


def create_environment() -> jinja2.Environment:
    """The environment that chat templates are written for, as transformers sets it up."""
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # rendering has a limit of its own, so nothing is computed while compiling
        extensions=[GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    environment.globals.pop("lipsum", None)
    return environment


def limit_memory() -> None:
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0)


class Renderer:
    """Compiles each template once and renders it under a timer; the kernel kills this process when the timer ends
    first."""

    def __init__(self) -> None:
        self._environment = create_environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def compile(self, name: str, text: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, 5.0)
        self._compiled[name] = self._environment.from_string(text)
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def render(self, name: str, variables: dict[str, Any], seconds: float, max_bytes: int) -> str:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        text = self._compiled[name].render(variables)
        if len(text.encode("utf-8", "surrogatepass")) > max_bytes:
            raise OutputTooLong
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return text


def answer(renderer: Renderer, body: bytes) -> dict[str, Any]:
    """{"compile": {name: text}} or {"render": name, "variables", "seconds", "max_bytes"} → {"text"} or {"kind",
    "error"}."""
    try:
        frame = json.loads(body)
        if "compile" in frame:
            for name, text in frame["compile"].items():
                renderer.compile(name, text)
            return {"text": ""}
        return {"text": renderer.render(frame["render"], frame["variables"], frame["seconds"], frame["max_bytes"])}
    except OutputTooLong:
        return {"kind": "size", "error": ""}
    except MemoryError:
        return {"kind": "memory", "error": ""}
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "error": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # whatever a stranger's program raised is an answer, not a failure of this loop
        return {"kind": "raised", "error": f"{error}"[:500] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process, whatever C code it is in
    limit_memory()
    answer_lines(partial(answer, Renderer()))


if __name__ == "__main__":
    main()
