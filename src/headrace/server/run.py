"""From configuration to a running server, and what it says at start.

What lives here: wiring and the start-up lines. What may not: flags (commands/serve.py), the order of life (lifecycle.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace import logs
from headrace.config import Decision, EngineConfig, ServerConfig
from headrace.errors import ConfigError, ModelError
from headrace.server.api import ROUTES
from headrace.server.auth import Guard
from headrace.server.lifecycle import CreateEngine, Lifecycle, address_of, bind
from headrace.server.moderation.watch import Moderator
from headrace.server.service import Engine, Service
from headrace.server.supervisor import Supervisor

SWITCH_SECONDS = 0.0005  # that a thread may keep the interpreter from the event loop, which asks for it at each of its callbacks

log = logging.getLogger("headrace.server")


def say(line: str) -> None:
    """Lines for the person who started the server."""
    print(line, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """The same where a program reads them."""
    log.info(line.strip())


def run_server(engine_config: EngineConfig, config: ServerConfig, version: str, create_engine: CreateEngine, *, began: float | None = None) -> int:
    """Serves until a signal or the engine's end; returns the exit status. ``began``: when the command started, on time.time().

    Raises ConfigError before anything has started, and what ``create_engine`` raises.
    """
    guard = Guard(config)
    os.environ[logs.FORMAT_VARIABLE] = config.log_format  # the engine's process inherits it
    logs.configure(config.log_format)
    sock = bind(config)

    def live(ready: Callable[[], None], since: float) -> int:
        return run_loop(_serve(engine_config, config, version, create_engine, guard, sock, since, ready))

    try:
        if config.supervise:
            return Supervisor(lambda ready: live(ready, time.time())).run()
        return live(lambda: None, time.time() if began is None else began)
    finally:
        sock.close()


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """uvloop where it is installed, asyncio elsewhere."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def _serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    version: str,
    create_engine: CreateEngine,
    guard: Guard,
    sock: socket.socket,
    began: float,
    started: Callable[[], None],
) -> int:
    address = address_of(sock)
    routes = [route.path for route in ROUTES]
    service = Service(config, version, routes, priority_scheduling=engine_config.scheduler.scheduling_policy == "priority")
    announce = tell if config.log_format == "json" else say
    await _check_template(engine_config.model.chat_template)
    service.moderator = await Moderator.start(config, model_folders(engine_config.model.model))
    announce(f"Headrace {version} listens on {address} and loads {engine_config.model.model or 'the bundled demo model'}.")

    def ready(engine: Engine) -> None:
        for line in describe(engine, service.decisions):
            announce(line)
        announce(f"Ready after {time.time() - began:.1f} s at {address}/v1{'' if config.api_key else ' (no key needed: this machine only)'}.")
        announce(f"In a browser: chat at {address}/, dashboard at {address}/dashboard.")
        started()
        faults.append(asyncio.ensure_future(_warn_of_template(engine, announce)))

    faults: list[asyncio.Future[None]] = []  # held, so that it is not collected before it has ended
    try:
        return await Lifecycle(service, guard, sock, create_engine, announce, ready).run()
    finally:
        await service.moderator.close()


async def _check_template(value: str | None) -> None:
    """A template that the user gives is tried before anything listens. Raises ConfigError."""
    if value is None:
        return
    from headrace.engine.tokenizer import check_chat_template

    try:
        await asyncio.to_thread(check_chat_template, value)
    except ModelError as error:
        raise ConfigError(error.message.replace("the model's chat template", "--chat-template", 1)) from None


async def _warn_of_template(engine: Engine, announce: Callable[[str], None]) -> None:
    """The model's own may be broken, or refuse what everybody sends; completions work all the same."""
    fault = None if engine.tokenizer is None else await asyncio.to_thread(engine.tokenizer.template_fault)
    if fault is not None:
        announce(f"Warning: chats will be refused: {fault} Give another template with --chat-template.")


def model_folders(model: str | None) -> tuple[str, ...]:
    """Where models lie: the one that is served, and the hub's cache."""
    hub = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    if model is None or not os.path.exists(model):
        return (hub,)
    return (model if os.path.isdir(model) else os.path.dirname(model) or ".", hub)


def describe(engine: Engine, decisions: Sequence[Decision] = ()) -> list[str]:
    """The model and every automatic choice (``decisions``: the server's own) with its reason; kernels, of which there are many, only by number."""
    info = engine.info
    lines = [f"  {', '.join(info.served_names)}: {info.dtype} on {info.device}, up to {info.max_sequence_tokens:,} tokens a sequence"]
    kernels = Counter(str(decision.value) for decision in info.decisions if decision.name.startswith("kernel "))
    plain = (*(decision for decision in info.decisions if not decision.name.startswith("kernel ")), *decisions)
    shown = [(decision.name, f"{decision.value}: {decision.reason}") for decision in plain]
    if kernels:
        shown.append(("kernels", ", ".join(f"{count} {name}" for name, count in kernels.items()) + ": headrace doctor says which and why"))
    width = max((len(name) for name, _ in shown), default=0)
    return lines + [f"  {name:<{width}}  {text}" for name, text in shown]
