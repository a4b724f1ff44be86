"""Several engines of one model (``--data-parallel-size``) as one: what AsyncLLM and the server take for its engine.

A request goes where the router says and stays there. A replica that dies ends its own requests; the others go on, and
whoever has launched it may put another at its place (``replace``). The engine is dead once all replicas are.

What lives here: that, prompts handed from one to another, answers of all replicas joined into one, numbers summed. What
may not: the rule of routing (routing.py, disagg/roles.py), notes' meaning (disagg/hand_over.py), processes, text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from headrace.config import Decision, EngineConfig
from headrace.disagg.hand_over import is_apart, prompt_alone
from headrace.disagg.notes import Note, Sent, Want
from headrace.disagg.roles import Change, Roles, Targets
from headrace.disagg.staging import staging_size
from headrace.engine import connection as frames
from headrace.engine.connection import HANG_SECONDS, EngineConnection, EngineSocket, OnDeath, OnEvent
from headrace.engine.info import EngineInfo
from headrace.engine.routing import Router
from headrace.errors import EngineDead
from headrace.portability import shared_file
from headrace.processes.child import Begun
from headrace.processes.messages import Question, pack
from headrace.request import FinishReason, Given, Json, Request, SequenceOutput

LOOK_SECONDS = 0.5
CHANGES = 64
END_HUNG_SECONDS = 20.0  # without progress; the whole engine gets as long (watch_engine)
_HOW = {
    "prefix": "each request goes where its first token is expected soonest, by what is cached and what waits there",
    "load": "each request goes where least waits",
    "turns": "each request goes to the next in turn",
}

Entry = tuple[Any, ...]  # of the decision log, as the scheduler has it (scheduler/roster.py)

log = logging.getLogger(__name__)


class Replicas:
    """``sockets``: one a replica. Has the interface of an EngineSocket; first ``await started()``."""

    def __init__(
        self,
        sockets: Sequence[EngineSocket],
        config: EngineConfig,
        router: Router | None = None,
        staging: int = -1,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``staging``: the file through which prompts are handed over, where this process has made it."""
        device, count = config.device, len(sockets)
        self._staging = staging
        self._sockets = list(sockets)
        self._router = router = router or Router(count, routing=device.data_parallel_routing)
        targets = Targets.of(config.scheduler)
        self._roles = Roles(
            count, device.prefill_replicas, now, memory=router.roles, load=router.load, share=router.fronts,
            targets=targets if router.front == 0 else None, changes=device.swap_roles,
        )  # fmt: skip
        self._changes = deque[Entry](maxlen=CHANGES)  # until they are read
        self.on_change: Callable[[Entry], None] = self._changes.append
        self._relay = Relay(self._sockets, self._roles)
        self._now, self._device, self._apart = now, device, device.prefill_replicas > 0
        self._on_event: OnEvent = lambda frame: None
        self._on_death: OnDeath = lambda error, ids: None
        self._loaded: dict[str, Sequence[Any]] = {}  # for replicas that come later
        self._news = _News(len(sockets))
        self._tending: asyncio.Task[None] | None = None
        self._closing = False
        for number, sock in enumerate(sockets):
            self._listen(number, sock)

    @classmethod
    async def launch(cls, config: EngineConfig, router: Router | None = None) -> Replicas:
        """A process for each; they load while the caller goes on."""
        count, regions = range(config.device.data_parallel_size), config.device.staging_regions
        staging = shared_file(staging_size(regions)) if regions else -1
        engines = [await EngineConnection.launch(config, number, staging) for number in count]
        found = cls(engines, config, router, staging)
        found._tending = asyncio.create_task(found._end_hung())
        return found

    async def launch_again(self, config: EngineConfig, number: int) -> EngineConnection:
        """A process for the place of one that has died."""
        return await EngineConnection.launch(config, number, self._staging)

    @property
    def own(self) -> list[EngineConnection]:
        """Those that were launched here."""
        return [each for each in self._sockets if isinstance(each, EngineConnection)]

    async def started(self) -> EngineInfo:
        """Once all can serve. Raises what kept one of them from that."""
        starting = [asyncio.ensure_future(each.started()) for each in self._sockets]
        try:
            for number, info in enumerate(await asyncio.gather(*starting)):
                self._router.learn(number, info.num_blocks, info.block_size)
        finally:
            for each in starting:
                each.cancel()
        return self.info

    @property
    def info(self) -> EngineInfo:
        info, how = self._sockets[0].info, f"replicas; {_HOW[self._device.data_parallel_routing]}{self._account}"
        return replace(info, decisions=(*info.decisions, Decision("data_parallel_size", len(self._sockets), how)))

    @property
    def _account(self) -> str:
        if not self._apart:
            return ""
        changing = ", at first; roles follow the load" if self._device.swap_roles else ""
        return (
            f"; {self._device.prefill_replicas} compute prompts, whose keys and values the others take over{changing}"
        )

    def listen(self, on_event: OnEvent, on_death: OnDeath) -> None:
        """``on_death`` gets the requests that a dead replica had; None: all, nothing is left."""
        self._on_event, self._on_death = on_event, on_death
        if self.death is not None:
            on_death(self.death, None)

    def replace(self, number: int, sock: EngineSocket) -> None:
        """Another process at the place of one that has died."""
        self._sockets[number] = sock
        self._listen(number, sock)
        self._news.forget(number)
        self._router.forget_prefixes(number)
        for load in self._loaded.values():
            sock.ask_later(frames.LoadAdapter, *load[:2], True)

    def _listen(self, number: int, sock: EngineSocket) -> None:
        sock.listen(partial(self._hear, number), partial(self._lost, number))
        sock.on_note = partial(self._relay.pass_on, number)

    # --- requests

    def submit(self, request: Request) -> None:
        up = self._up()
        if self._apart:
            self._change_roles(up)
        prompts, answers = self._roles.split(up)
        answer, prompt = self._router.pair(request, answers, prompts if is_apart(request) else ())
        if self._apart:
            self._roles.asked(request.request_id, answer, prompt)
        if answer == prompt:
            self._sockets[answer].submit(request)
        else:
            self._relay.begin(request, answer, prompt)

    def _up(self) -> list[int]:
        """Those that are well; where none is, those that live."""
        return [number for number, each in enumerate(self._sockets) if each.alive] or [
            number for number, each in enumerate(self._sockets) if not each.dead
        ]

    def _change_roles(self, up: Sequence[int]) -> None:
        for change in self._roles.look(up):
            log.info("%s", told(change))
            self.on_change(entry_of(change))
        if (advice := self._roles.advice) is not None:
            self._roles.advice = None
            log.warning("%s", advice)

    def abort(self, request_id: int) -> None:
        self._relay.abort(request_id)
        self._roles.ended(request_id)
        if (number := self._router.ended(request_id)) is not None:
            self._sockets[number].abort(request_id)

    def finish(self, request_id: int, index: int, num_tokens: int) -> None:
        if (number := self._router.where(request_id)) is not None:
            self._sockets[number].finish(request_id, index, num_tokens)
            self._answered(request_id, index)

    def _hear(self, number: int, frame: frames.Step) -> None:
        if self._apart and frame.rows:
            frame = self._relay.hear(number, frame, self._router.where)
        for out in frame.rows:
            if out.num_cached_tokens is not None:
                self._router.began(out.request_id)
                self._roles.began(out.request_id)
            if out.finished is not None:
                self._answered(out.request_id, out.index)
        if self._apart and (frame.rows or frame.request_ids):
            self._roles.stepped(number, self._now())
        self._on_event(frame)

    def _answered(self, request_id: int, index: int) -> None:
        self._router.answered(request_id, index)
        if self._apart and self._router.where(request_id) is None:
            self._roles.ended(request_id)

    def _lost(self, number: int, error: EngineDead, ids: object) -> None:
        lost, count = frozenset(self._router.lost(number)), len(self._sockets)
        for request_id in lost:
            self._relay.abort(request_id)
            self._roles.ended(request_id)
        for request in self._relay.lost(number):
            prompts, _ = self._roles.split(self._up())
            self._relay.compute_again(request, self._router.move_prompt(request, prompts) if prompts else None)
        if self.death is not None:
            self._on_death(self.death, None)
            return
        if isinstance(self._sockets[number], EngineConnection) and not self._closing:
            why = error.message.removesuffix(" Restart the server.")
            log.error("Replica %d of %d: %s Its requests are ended, the others' go on.", number, count, why)
        self._on_death(EngineDead(f"replica {number} of {count} has died; send the request again."), lost)

    # --- state

    @property
    def death(self) -> EngineDead | None:
        """Of the last one."""
        return self._sockets[-1].death if all(each.dead for each in self._sockets) else None

    @property
    def dead(self) -> bool:
        return self.death is not None

    @property
    def ailment(self) -> str | None:
        """Of all of them; one that is well serves."""
        ails = [each.ailment for each in self._sockets]
        return None if None in ails else f"no replica serves: {ails[0]}"

    @property
    def alive(self) -> bool:
        return self.ailment is None

    @property
    def asleep(self) -> int:
        """The level at which all of them sleep, or are about to; 0: requests go on."""
        return min((each.asleep for each in self._sockets if not each.dead), default=0)

    async def stats(self) -> Json:
        """Sums of all replicas, and each one's own by its number ("replicas")."""
        return _with_sums(await self._ask(frames.AskStats)) | self._told_roles

    @property
    def _told_roles(self) -> Json:
        if not self._apart:
            return {}
        return {"roles": {"prompts": self._roles.told, "changes": self._roles.num_changes}}

    async def recent(self, step: int, decision: int) -> Json:
        """As of one engine: steps and decisions of all replicas in one order, with numbers of their own. For one reader:
        what has been told is not told again."""
        asked = self._ask(frames.AskRecent, self._news.seen.__getitem__)
        told = self._news.add(await asked, self._changes) | self._told_roles
        self._changes.clear()
        return told

    async def ask(self, kind: type[Question], *about: Any) -> Json:
        """All replicas are asked: of each thing, what the first says that knows it; those that answer come first."""
        found = await self._ask(kind, lambda _: about)
        joined = _joined(value for _, value in sorted(found.items(), key=lambda each: self._roles.computes(each[0])))
        if kind is frames.LoadAdapter and joined.get("error") is None:
            self._loaded[about[0]] = about
        elif kind is frames.UnloadAdapter:
            self._loaded.pop(about[0], None)
        elif kind in (frames.ForgetPrefixes, frames.Sleep):
            self._router.forget_prefixes(*range(len(self._sockets)))
        return joined

    async def _ask(self, kind: type[Question], about: Callable[[int], Sequence[Any]] = lambda _: ()) -> dict[int, Json]:
        """By replica; ``about``: what is asked of each. One that dies meanwhile says nothing. Raises EngineDead where none is left."""

        async def one(number: int) -> Json | None:
            with contextlib.suppress(EngineDead):
                return await self._sockets[number].ask(kind, *about(number))
            return None

        numbers = [number for number, each in enumerate(self._sockets) if not each.dead]
        answers = await asyncio.gather(*map(one, numbers))
        found = {number: answer for number, answer in zip(numbers, answers, strict=True) if answer is not None}
        if not found:
            raise self.death or EngineDead("no replica answers.")
        return found

    async def _end_hung(self) -> None:
        """For ever: a replica without progress is ended, so that its requests are. (Looks, not seconds: a process that
        was stopped itself has seen nothing.)"""
        looks: dict[EngineSocket, int] = {}
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            looks = {each: looks.get(each, 0) + 1 for each in self._sockets if not each.alive and not each.dead}
            for each, count in looks.items():
                if count * LOOK_SECONDS >= END_HUNG_SECONDS and isinstance(each, EngineConnection):
                    log.error("A replica hangs and is ended: %s.", each.ailment)
                    each.kill()

    async def close(self, timeout: float = HANG_SECONDS) -> None:
        self._closing = True
        if self._tending is not None:
            self._tending.cancel()
        await asyncio.gather(*(each.close(timeout) for each in self._sockets))
        if self._staging >= 0:
            os.close(self._staging)
            self._staging = -1


async def launch_engine(
    config: EngineConfig, router: Router | None = None, begun: Begun | None = None
) -> EngineConnection | Replicas:
    """Processes that load while the caller goes on; then ``await started()``. ``begun``: the process of an only one."""
    if config.device.data_parallel_size > 1:
        return await Replicas.launch(config, router)
    return await EngineConnection.launch(config, begun=begun)


def told(change: Change) -> str:
    role, why = "computes prompts" if change.prompts else "answers", change.why
    return (
        f"Replica {change.replica} {role} from now on: prompts waited {why.queue:.2f} s, requests {why.room:.2f} s for room "
        f"where they are answered, and tokens came every {1e3 * why.gap:.0f} ms."
    )


def entry_of(change: Change) -> Entry:
    """The replica, then microseconds."""
    seconds = (change.why.queue, change.why.room, change.why.gap)
    kind = "computes_prompts" if change.prompts else "answers"
    return 0, change.at, kind, -1, (change.replica, *(round(1e6 * each) for each in seconds)), ""


class _News:
    """Steps and decisions of several engines under numbers of ours. Each engine numbers its own from the start."""

    def __init__(self, replicas: int) -> None:
        self.seen = [(-1, 0)] * replicas  # the last step and decision of each
        self._steps, self._decisions = -1, 0

    def forget(self, number: int) -> None:
        self.seen[number] = (-1, 0)

    def add(self, answers: Mapping[int, Json], ours: Iterable[Entry]) -> Json:
        """``ours``: decisions that were taken here."""
        records, decisions = [], list(ours)
        for number, answer in answers.items():
            steps, told = answer.pop("records"), answer.pop("decisions")
            step, decision = self.seen[number]
            self.seen[number] = (steps[-1]["step_id"] if steps else step, told[-1][0] if told else decision)
            records += steps
            decisions += told
        records.sort(key=lambda each: each["begin"])
        decisions.sort(key=lambda each: each[1])
        first, self._steps = self._steps + 1, self._steps + len(records)
        entry, self._decisions = self._decisions + 1, self._decisions + len(decisions)
        return {
            **_with_sums(answers),
            "records": [{**each, "step_id": first + at} for at, each in enumerate(records)],
            "decisions": [(entry + at, *each[1:]) for at, each in enumerate(decisions)],
        }


def _joined(answers: Iterable[Given]) -> Json:
    """Lists are joined place by place."""
    found: Json = {}
    for answer in answers:
        for name, value in answer.items():
            if isinstance(value, list) and isinstance(mine := found.get(name), list):
                pairs = zip_longest(mine, value)
                found[name] = [theirs if own is None else own for own, theirs in pairs]
            elif found.get(name) is None:
                found[name] = value
    return found


_ALIKE = frozenset(("bounds", "promise_seconds", "slots"))
_MEANS = frozenset(("signed", "absolute"))


def _with_sums(answers: Mapping[int, Given]) -> Json:
    total: Json = _sum("", list(answers.values()))
    if steps := total.get("steps"):
        measured, idle = steps["measured_seconds"], steps["idle_seconds"]
        steps["roofline_fraction"] = steps["floor_seconds"] / measured if measured > 0 else 0.0
        steps["idle_share"] = idle / (idle + measured) if measured > 0 else 0.0
    return {**total, "replicas": dict(answers)}


def _sum(name: str, values: Sequence[Any]) -> Any:
    """Of what replicas say under one name; of some things there is no sum."""
    known = [each for each in values if each is not None]
    if not known:
        return None
    if name == "last_step":
        return max(known, key=lambda each: float(each["begin"]))
    if name == "promise_tail":
        return max(known)
    first = known[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in known for key in each)
        return {key: _sum(str(key), [each.get(key) for each in known]) for key in keys}
    if name in _ALIKE or isinstance(first, str):
        return first
    if isinstance(first, list | tuple):
        return [sum(each) for each in zip_longest(*known, fillvalue=0)]
    return sum(known) / len(known) if name in _MEANS else sum(known)


@dataclass(slots=True)
class _Apart:
    request: Request
    answers: int
    computes: int | None  # None: none any more
    wanted: int | None = None  # the first node that has not been sent
    # tokens of the prompt that were found cached by who answers, and by who computes
    had: int | None = None
    found: int | None = None


class Relay:
    """A front end's part where some replicas compute prompts and the others answer: both are told, and their notes to
    each other passed on.

        front end   →  who answers           AwaitPrompt: the request
        front end   →  who computes          ComputePrompt: its prompt, for one token that is not shown
        who answers →  who computes          Want, Taken
        who computes → who answers           Sent

    Of one that dies while it computes a prompt, another takes over from the first node that was not sent; where there
    is none, who answers computes the rest. Who answers has told its own cached tokens as everything that came to it;
    the number that clients see is what either of them had found cached.

    ``sockets``: of all replicas. ``roles`` is told how far requests are.
    """

    def __init__(self, sockets: Sequence[EngineSocket], roles: Roles) -> None:
        self._sockets, self._roles = sockets, roles
        self._open: dict[int, _Apart] = {}  # until there is a first token

    def begin(self, request: Request, answers: int, computes: int) -> None:
        self._open[request.request_id] = _Apart(request, answers, computes)
        self._sockets[answers].send(pack(frames.AwaitPrompt(request)))
        self._compute(request, computes)

    def _compute(self, request: Request, number: int) -> None:
        self._sockets[number].send(pack(frames.ComputePrompt(prompt_alone(request))))

    def abort(self, request_id: int) -> None:
        """Who answers is told by others."""
        apart = self._open.pop(request_id, None)
        if apart is not None and apart.computes is not None:
            self._sockets[apart.computes].abort(request_id)

    def lost(self, number: int) -> list[Request]:
        """Whose prompts that one still had to send."""
        return [each.request for each in self._open.values() if each.computes == number]

    def compute_again(self, request: Request, number: int | None) -> None:
        """By that one; None: by who answers."""
        apart = self._open[request.request_id]
        if number is None:
            self._go_on(apart)
            return
        apart.computes = number
        self._roles.moved(request.request_id, number)
        self._compute(request, number)
        if apart.wanted is not None:
            self._sockets[number].send(frames.pack_note(Want(request.request_id, apart.wanted, 0)))

    def _go_on(self, apart: _Apart) -> None:
        request_id = apart.request.request_id
        if apart.computes is not None:
            self._sockets[apart.computes].abort(request_id)
        apart.computes = None
        self._sockets[apart.answers].send(pack(frames.GoOn(request_id)))

    def pass_on(self, number: int, note: Note) -> None:
        apart = self._open.get(note.request_id)
        if apart is None:
            return
        if isinstance(note, Sent):
            if apart.computes == number:
                apart.wanted = note.first + len(note.slots)
                self._sockets[apart.answers].send(frames.pack_note(note))
            return
        if isinstance(note, Want):
            apart.wanted, apart.had = note.first, note.cached
            self._roles.has_room(note.request_id)
        if apart.computes is not None:
            self._sockets[apart.computes].send(frames.pack_note(note))

    def hear(self, number: int, frame: frames.Step, where: Callable[[int], int | None]) -> frames.Step:
        """What clients are to see of it. ``where``: who answers a request. (A prompt that is computed for another
        replica ends with its token, so none of these is in the columns.)"""
        for out in frame.rows:
            if (apart := self._open.get(out.request_id)) is not None and apart.computes == number:
                self._computed(apart, out)
        theirs = [self._begun(out) for out in frame.rows if where(out.request_id) in (number, None)]
        return frames.Step(frame.request_ids, frame.indexes, frame.token_ids, tuple(theirs))

    def _computed(self, apart: _Apart, out: SequenceOutput) -> None:
        self._roles.computed(out.request_id)
        if out.finished is not None and out.finished.reason is FinishReason.ERROR:
            self._go_on(apart)
        elif apart.found is None:  # later it finds what it has computed itself
            apart.found = out.num_cached_tokens

    def _begun(self, out: SequenceOutput) -> SequenceOutput:
        """Of who answers: with the first token, or the end, nothing more is to be passed on."""
        if out.num_cached_tokens is None and out.finished is None:
            return out
        apart = self._open.get(out.request_id)
        if apart is None:
            return out
        self.abort(out.request_id)
        if apart.had is None or out.num_cached_tokens is None:
            return out
        return out._replace(num_cached_tokens=max(apart.had, apart.found or 0))
