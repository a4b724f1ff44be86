"""The engine's process, ``python -m headrace.engine.process``: its start, its pulse and its end.

What lives here: that order, and the first step. What may not: the loop and its sockets (loop.py), the messages
(connection.py).

A thread sends a Beat every second with the loop's stamps, also while a step runs; it ends the process when the parent
is gone.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from array import array
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from headrace.engine import connection as frames
from headrace.engine.loop import EngineLoop, Link, Links, LoopState, ParentGone, StampedExecutor
from headrace.errors import HeadraceError, StepFailed
from headrace.observe.logs import configure_child
from headrace.portability import ignore_terminal
from headrace.processes.child import share_interpreter
from headrace.processes.frames import parent_socket
from headrace.processes.garbage import empty_free_lists, freeze_start, no_collections
from headrace.processes.messages import BadFrame, pack, receive
from headrace.processes.tree import end_with_parent
from headrace.request import Expectations, FinishReason, Request, SamplingParams
from headrace.torch_environment import leave_out_compilers

if TYPE_CHECKING:
    from headrace.engine.assembly import Engine

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
TIDY_BEATS = 60
LAST_WORDS_SECONDS = 1.0  # for what was said last to be read
FIRST_STEP = -1  # the request that no client sent


def beat_forever(links: Links, state: LoopState) -> None:
    """The pulse of the process, and its end when the parent is gone, whatever the loop is doing."""
    for beat in itertools.count(1):
        time.sleep(BEAT_SECONDS)
        if beat % TIDY_BEATS == 0:
            empty_free_lists()
        try:
            links.send(pack(state.beat()))
        except ParentGone:
            os._exit(1)


def end_now(links: Links, why: str) -> None:
    """From a thread, whatever the loop is waiting for: one of the engine's ranks is gone."""
    with suppress(ParentGone):
        links.send(pack(frames.Died(why)))
        links.finish(LAST_WORDS_SECONDS)
    os._exit(1)


def _import_ahead() -> None:
    """What is needed whatever the Launch says, while the parent imports what it needs to send one."""
    with no_collections():
        import_module("headrace.engine.assembly")


def _start(launch: frames.Launch, links: Links, state: LoopState) -> Engine | None:
    """The engine, or None after the parent has been told why not."""
    try:
        # torch and all: after the socket, so that the pulse is heard meanwhile
        leave_out_compilers()
        with no_collections():
            from headrace.engine.assembly import create_engine, take_place

        take_place(launch.config.device, launch.replica)
        least = launch.config.device.device_time
        engine = create_engine(
            launch.config,
            wrap=lambda executor, recorder: StampedExecutor(executor, recorder, state, least),
            with_tokenizer=False,
            lost=partial(end_now, links),
            replica=launch.replica,
            staging=launch.staging,
        )
        if not least:  # a device whose time is made up proves nothing by it
            take_first_step(engine)
        return engine
    except HeadraceError as error:
        links.send(pack(frames.StartFailed(type(error).__name__, error.message)))
    except Exception as error:
        log.exception("the engine could not start")
        links.send(pack(frames.StartFailed("", f"{type(error).__name__}: {error}")))
    return None


def take_first_step(engine: Engine) -> None:
    """One token of one request, all the way: an engine that says it can serve has done so. Raises StepFailed. Not
    counted among the steps."""
    core = engine.core
    core.observe(None)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    patient = Expectations(ttft=3600.0, tpot=3600.0)
    ids = array("i", (0,))
    core.add(
        Request(
            request_id=FIRST_STEP, prompt_token_ids=ids, params=params, arrival_time=core.clock.now(), expects=patient
        )
    )
    ends = []
    while core.has_work:
        ends += [out.finished for out in core.step() if out.finished is not None]
    core.observe(engine.recorder if engine.trace is None else engine.trace)
    if [end.reason for end in ends] not in ([FinishReason.LENGTH], [FinishReason.STOP]):  # the latter: it pools
        raise StepFailed(
            f"the engine's first step failed: {ends[0].message if ends else 'it brought nothing'}. See `headrace doctor`."
        )


def _serve(engine: Engine, links: Links, state: LoopState) -> int:
    links.send(pack(frames.Started(engine.info)))
    freeze_start()  # the model and the modules live as long as the process; the parent has things to do meanwhile
    try:
        EngineLoop(engine, links, state).run()
    except (ParentGone, BadFrame) as error:
        return 0 if isinstance(error, ParentGone) else 1
    except Exception as error:
        log.exception("the engine failed")
        links.send(pack(frames.Died(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        engine.close()
    return 0


def main() -> None:
    """The process. Its parent decides when it ends: a Ctrl-C or SIGTERM meant for the group lets running requests
    drain."""
    ignore_terminal()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_child()
    share_interpreter()  # kernels are built, and adapters read, in threads beside the one that runs steps
    logging.getLogger("headrace").setLevel(os.environ.get("HEADRACE_LOG_LEVEL", "info").upper())
    try:
        sock, state = parent_socket(), LoopState()
        parent = int(sys.argv[1]) if sys.argv[1:] else None  # one that has much to do before it speaks
        end_with_parent(parent)  # from here on nothing of ours is left behind
        if parent is not None:
            _import_ahead()
        launch = receive(sock, frames.Launch)
        links = Links(Link(sock, frames.Command), socket.socket(fileno=launch.door))
        threading.Thread(target=beat_forever, args=(links, state), daemon=True, name="pulse").start()
        engine = _start(launch, links, state)
        status = 1 if engine is None else _serve(engine, links, state)
        links.finish(LAST_WORDS_SECONDS)
        sys.exit(status)
    except (ParentGone, BadFrame):
        sys.exit(1)


if __name__ == "__main__":
    main()
