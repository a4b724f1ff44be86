"""From configuration to a running server, and what it says at start.

What lives here: wiring and the start-up lines. What may not: flags (commands/serve.py), the order of life
(lifecycle.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config import Decision, EngineConfig, ServerConfig
from headrace.errors import ConfigError, ModelError
from headrace.observe import logs
from headrace.portability import missing
from headrace.processes.child import share_interpreter
from headrace.server.app import ROUTES
from headrace.server.exposition import Counters
from headrace.server.frontends.link import Launch
from headrace.server.frontends.parent import FrontEnds, supervise
from headrace.server.lifecycle import CreateEngine, EngineLife, Signals, address_of, bind
from headrace.server.limits import Guard, check_operators, check_weights
from headrace.server.members.life import MembersConfig, MembersLife, StartEngine, create_members
from headrace.server.members.routes import SharedService, routes_of
from headrace.server.moderation.watch import moderating
from headrace.server.service import Service
from headrace.server.tls import create_context

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM

log = logging.getLogger("headrace.server")


def say(line: str) -> None:
    """Lines for the person who started the server, in place of what a loading engine has drawn on the terminal last."""
    print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """The same where a program reads them."""
    log.info(line.strip())


def run_server(
    engine_config: EngineConfig,
    config: ServerConfig,
    version: str,
    create_engine: CreateEngine,
    *,
    began: float | None = None,
) -> int:
    """Serves until a signal or the engine's end; returns the exit status. ``began``: when the command started, on
    time.time().

    Raises ConfigError before anything has started, and what ``create_engine`` raises.
    """
    check_weights(engine_config.scheduler, config)
    with _begun(engine_config, config, version, began) as life:
        below = config.supervise or config.api_server_count > 1
        return run_loop(life.serve_below() if below else life.serve(create_engine))


def run_members(
    members: MembersConfig, config: ServerConfig, version: str, start: StartEngine, *, began: float | None = None
) -> int:
    """The same for several models, each with an engine that ``start`` makes."""
    if config.supervise or config.api_server_count > 1:
        raise ConfigError(
            "--models has one front end, which starts models again that die; leave out --supervise and --api-server-count."
        )
    for each in members.members:
        check_weights(each.engine.scheduler, config)
    with _begun(members.members[0].engine, config, version, began) as life:
        return run_loop(life.serve_members(members, start))


@contextlib.contextmanager
def _begun(engine_config: EngineConfig, config: ServerConfig, version: str, began: float | None) -> Iterator[_Startup]:
    guard = Guard(config)
    create_context(config)  # files that cannot be used are found out before anything starts
    check_operators(config)
    logs.tell_processes(config.log_format)
    logs.configure(config.log_format)
    sock = bind(config)
    try:
        yield _Startup(engine_config, config, version, guard, sock, time.time() if began is None else began)
    finally:
        sock.close()
        if config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """uvloop where it is installed, asyncio elsewhere."""
    share_interpreter()  # an event loop asks for it at each of its callbacks
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True)
class _Startup:
    """A server from its socket to its end. ``began``: on time.time()."""

    engine_config: EngineConfig
    config: ServerConfig
    version: str
    guard: Guard
    sock: socket.socket
    began: float

    async def serve_below(self) -> int:
        """Front ends in processes of their own. What none of them could have is found out once."""
        await _check_template(self.engine_config.model.chat_template)
        async with moderating(self.config, self.engine_config.model.model):
            pass
        signals, counters = Signals(), Counters.create(self.config.api_server_count)
        began = itertools.chain([self.began], iter(time.time, None))  # of each life

        def begin() -> FrontEnds:
            greeting = _StartupLines(self, next(began))
            launch = Launch(
                self.engine_config, self.config, self.version, self.guard.secret, created=int(time.time()), listener=self.sock.fileno(),
                counters=counters.fd, parent=os.getpid(), log_level=logging.getLevelName(logging.getLogger("headrace").level),
            )  # fmt: skip
            return FrontEnds(launch, signals, greeting.say, greeting.ready)

        with signals.handled():
            return await (supervise(begin, signals) if self.config.supervise else begin().run())

    async def serve(self, create_engine: CreateEngine) -> int:
        routes = [route.path for route in ROUTES]
        service = Service(self.config, self.version, routes, engine_config=self.engine_config)
        await _check_template(self.engine_config.model.chat_template)
        faults: list[asyncio.Future[None]] = []  # held, so that it is not collected before it has ended

        def ready(engine: AsyncLLM) -> None:
            greeting.ready(describe(engine, service.model.decisions))
            faults.append(asyncio.ensure_future(warn_of_template(engine, greeting.say)))

        async with moderating(self.config, self.engine_config.model.model) as service.moderator:
            greeting = _StartupLines(self, self.began)  # once all that is known to be wrong has been said
            return await EngineLife(service, self.guard, self.sock, greeting.say, create_engine, ready).run()

    async def serve_members(self, config: MembersConfig, start: StartEngine) -> int:
        shared = SharedService(self.config, self.version, [route.path for route in ROUTES])
        members = create_members(config, shared)
        for one in config.members:
            await _check_template(one.engine.model.chat_template)
        greeting = _StartupLines(self, self.began, ", ".join(each.name for each in members))

        def ready() -> None:
            greeting.ready([f"  {each.name}: {each.summary}" for each in members])

        async with moderating(self.config, config.members[0].engine.model.model) as moderator:
            for each in members:
                each.service.moderator = moderator
            routes = routes_of(shared)
            return await MembersLife(shared, self.guard, self.sock, greeting.say, start, ready, routes=routes).run()


class _StartupLines:
    """What a start says to the person who started it."""

    def __init__(self, life: _Startup, began: float, loads: str | None = None) -> None:
        self.say = tell if life.config.log_format == "json" else say
        self._began = began
        self._address = address_of(life.sock, "https" if life.config.ssl_certfile else "http")
        self._unix = life.config.uds is not None
        self._open = not life.config.api_key
        self._any_page = self._open and "*" in life.config.allowed_origins
        self.say(
            f"Headrace {life.version} listens on {self._address} and loads {loads or life.engine_config.model.model or 'the bundled demo model'}."
        )
        if gone := missing():
            self.say(f"This system lacks what Linux has: {'; '.join(gone)}.")

    def ready(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line)
        if self._any_page:
            self.say(
                "Warning: --allowed-origins is '*' and there is no key: any page opened on this machine may use the server."
            )
        key = (
            f" (no key needed: {'the owner of the file' if self._unix else 'this machine'} only)" if self._open else ""
        )
        self.say(f"Ready after {time.time() - self._began:.1f} s at {self._address}{'' if self._unix else '/v1'}{key}.")
        if not self._unix:
            self.say(f"In a browser: chat at {self._address}/, dashboard at {self._address}/dashboard.")


async def _check_template(value: str | None) -> None:
    """A template that the user gives is tried before anything listens. Raises ConfigError."""
    if value is None:
        return
    from headrace.engine.tokenizer import check_chat_template

    try:
        await asyncio.to_thread(check_chat_template, value)
    except ModelError as error:
        raise ConfigError(error.message.replace("the model's chat template", "--chat-template", 1)) from None


async def warn_of_template(engine: AsyncLLM, announce: Callable[[str], None]) -> None:
    """The model's own may be broken, or refuse ordinary messages; completions work all the same."""
    if engine.info.pooling is not None or engine.tokenizer is None:
        return
    if (fault := await asyncio.to_thread(engine.tokenizer.template_fault)) is not None:
        announce(f"Warning: chats will be refused: {fault} Give another template with --chat-template.")
    if (mixed := await asyncio.to_thread(engine.tokenizer.boundary_fault)) is not None:
        announce(
            f"Warning: {mixed}: special tokens that a client writes in messages are read as such. Give another template with --chat-template."
        )


def describe(engine: AsyncLLM, decisions: Sequence[Decision] = ()) -> list[str]:
    """The model and every automatic choice (``decisions``: the server's own) with its reason; kernels, of which there
    are many, only by number."""
    info = engine.info
    lines = [
        f"  {', '.join(info.served_names)}: {info.dtype} on {info.device}, up to {info.max_sequence_tokens:,} tokens a sequence"
    ]
    if engine.tokenizer is None:
        lines.append(
            "  No tokenizer is beside this model: prompts and answers are token ids only; --tokenizer takes another model's folder."
        )
    kernels = Counter(str(decision.value) for decision in info.decisions if decision.name.startswith("kernel "))
    plain = (*(decision for decision in info.decisions if not decision.name.startswith("kernel ")), *decisions)
    shown = [(decision.name, f"{decision.value}: {decision.reason}") for decision in plain]
    if kernels:
        counted = ", ".join(f"{count} {name}" for name, count in kernels.items())
        shown.append(("kernels", f"{counted}: headrace doctor says which and why"))
    width = max((len(name) for name, _ in shown), default=0)
    return lines + [f"  {name:<{width}}  {text}" for name, text in shown]
