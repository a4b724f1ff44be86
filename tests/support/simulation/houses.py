"""Several replicas, some of which compute the prompts of others, and adapters that operators load and unload meanwhile:
the real front end, loops and desks, in any order of turns.

What lives here: that life, and its schedules. What may not: one engine's life (life.py).
"""

from __future__ import annotations

import hashlib
import os
import random
from array import array
from collections import Counter
from typing import Any

from headrace.disagg.staging import staging_size
from headrace.engine import connection as frames
from headrace.engine.core import EngineCore
from headrace.engine.executor import AdapterOutcome
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.lora.registry import AdapterRegistry
from headrace.portability import shared_file
from headrace.processes.messages import pack
from headrace.request import FinishReason, Request, SamplingParams
from headrace.scheduler.events import AddRequest, RefuseRequest
from headrace.spec import AdapterSpace
from tests.support import hash_engine
from tests.support.hand_over import House
from tests.support.simulation import oracle
from tests.support.simulation.broken import hold
from tests.support.simulation.oracle import ADAPTERS, VOCAB, Line
from tests.support.simulation.schedule import (
    TURN,
    Abort,
    Add,
    Asked,
    Event,
    Group,
    Load,
    Part,
    Setting,
    Turn,
    Unload,
)

PATIENCE = 3000  # turns in which everybody ends, once nothing more happens
_TOLD = ("There is no adapter", "was unloaded before its turn")


def draw_house(rng: random.Random, events: int) -> tuple[Setting, tuple[Event, ...]]:
    setting = Setting(
        depth=rng.choice((0, 1)),
        groups=(Group(4, rng.choice((90, 200))),),
        length=120,
        budget=32,
        adapters=rng.choice((1, 2, 3)),
        held=rng.choice((1, 3)),
        reads=rng.choice((0, 3)),
        replicas=rng.choice((2, 2, 3)),
    )
    operated, told, count = rng.random() < 0.6, list[Event](), 0
    while len(told) < events:
        drawn, name = rng.random(), rng.choice(ADAPTERS)
        if drawn < 0.08:
            told.append(Add(count, _asked(rng)))
            count += 1
        elif drawn < 0.11 and operated:
            told += [Unload(name), *[Load(name, fresh=rng.random() < 0.5)] * (rng.random() < 0.8)]
        elif drawn < 0.13 and operated:
            told.append(Abort(rng.randrange(count + 1)))
        else:
            told.append(rng.choice((TURN, Part(rng.randrange(setting.replicas), tells=rng.random() < 0.7))))
    return setting, tuple(told[:events])


def _asked(rng: random.Random) -> Asked:
    trunk, own = rng.randrange(3), rng.randrange(3, 30)
    prompt = [(trunk * 37 + place * 11) % VOCAB for place in range(rng.choice((40, 70)))]
    prompt += [rng.randrange(VOCAB) for _ in range(own)]
    return Asked(prompt=tuple(prompt), max_tokens=rng.choice((1, 4, 9)), adapter=rng.choice((None, *ADAPTERS)))


class _Executor(KeyedHashExecutor):
    """``reads``: turns that reading an adapter takes."""

    reads = left = 0

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        self.left = self.left - 1 if self.left > 0 and self._outcomes else self.reads
        return [] if self.left else super().outcomes(wait)


class _Desk(AdapterRegistry):
    """``keys``: of requests that are answered here, as they began."""

    def __init__(self, executor: _Executor, most_held: int) -> None:
        super().__init__(
            lambda folder: None, executor.control, most_held, identify=lambda folder: folder.rpartition("/")[2]
        )
        self.keys: dict[int, str] = {}

    def take_ready(self, *told: Any) -> list[AddRequest | RefuseRequest]:
        ready = super().take_ready(*told)
        for request in (event.request for event in ready if isinstance(event, AddRequest)):
            if request.params.detokenize:  # the prompt alone is nobody's answer
                self.keys[request.request_id] = request.adapter or ""
        return ready


class HouseLife:
    """As Life is; ``setting.replicas`` engines, the first of which computes prompts for the others."""

    def __init__(self, setting: Setting, *, traced: bool = False) -> None:
        self.turns, self.seen = 0, Counter[str]()
        self._setting, self._asked, self._gone = setting, dict[int, Asked](), set[int]()
        self._files, self._operated = dict.fromkeys(ADAPTERS, 0), False
        fd = shared_file(staging_size(4))
        self.desks: list[_Desk] = []
        try:
            self.house = House(fd, [self._create_core(number) for number in range(setting.replicas)])
        finally:
            os.close(fd)
        self.house.front.listen(self._hear, lambda error, ids: None)

    def _hear(self, frame: frames.Step) -> None:
        """As a client does: of what has ended, or is not wanted any more, nothing is heard."""
        told = [out for out in frames.unpack_step(frame) if out.request_id not in self._gone]
        self.house.answers.take([out for out in told if (out.request_id, out.index) not in self._finished])

    @property
    def trace(self) -> str:
        told = sorted(self.house.answers.tokens.items())
        return hashlib.sha256(repr((self.turns, told)).encode()).hexdigest()

    def _create_core(self, number: int) -> EngineCore:
        setting = self._setting
        slots = max(setting.adapters, setting.held)
        info = keyed_hash_info(
            vocab_size=VOCAB, max_model_len=setting.length, max_num_seqs=setting.rows, block_size=setting.groups[0].block_size,
            num_blocks=setting.groups[0].num_blocks, adapters=AdapterSpace(slots, setting.adapters),
        )  # fmt: skip
        executor = _Executor(info)
        executor.reads = setting.reads
        core = hash_engine.engine(info=info, executor=executor, depth=setting.depth, budget=setting.budget)
        core.adapters = desk = _Desk(executor, slots)
        self.desks.append(desk)
        for name in ADAPTERS:
            if not number:  # it has a history of its own
                desk.register(name, f"/{name}/old")
                desk.unregister(name)
            desk.register(name, f"/{name}/0")
        return core

    def happen(self, event: Event) -> None:
        replicas = self.house.replicas
        match event:
            case Turn():
                for each in replicas:
                    self._turn(each, tells=True)
            case Part(number, tells):
                self._turn(replicas[number % len(replicas)], tells=tells)
            case Add(number, asked) if number not in self._asked:
                self._asked[number] = asked
                params = SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True)
                self.house.front.submit(
                    Request(
                        request_id=number,
                        prompt_token_ids=array("i", asked.prompt),
                        params=params,
                        adapter=asked.adapter,
                    )
                )
            case Abort(number) if number in self._asked:
                self._gone.add(number)
                self.house.front.abort(number)
            case Load(name, fresh):
                self._files[name] += fresh
                self._operate(frames.LoadAdapter(0, name, f"/{name}/{self._files[name]}"))
            case Unload(name):
                self._operate(frames.UnloadAdapter(0, name))

    def _operate(self, command: Any) -> None:
        self._operated = True
        for each in self.house.replicas:
            each.send(pack(command))

    def _turn(self, replica: Any, *, tells: bool) -> None:
        self.turns += 1
        if replica.has_work:
            replica.turn()
        while tells and replica.outbox:
            replica.tell()

    def end(self) -> None:
        """Everybody ends; answers are those of their adapters, and nothing is held."""
        replicas = self.house.replicas
        for _ in range(PATIENCE):
            if not any(each.has_work or each.outbox for each in replicas):
                break
            self.happen(TURN)
        else:
            raise_busy = [number for number, each in enumerate(replicas) if each.has_work]
            hold(False, "asleep", f"replicas {raise_busy} are busy, and requests {self._open()} do not end")
        hold(not self._open(), "requests", f"{self._open()} never ended")
        for number, asked in self._asked.items():
            self._check_answer(number, asked)
        self.house.assert_at_rest()
        counts = [self.house.handed(number) for number in range(len(replicas))]
        self.seen["handed over"] += sum(each.taken for each in counts)
        alone = sum(each.alone for each in counts)
        hold(self._operated or not alone, "hand-over", f"{alone} prompts were computed twice, though nobody operated")

    def _open(self) -> list[int]:
        return [number for number in self._asked if number not in self._gone and (number, 0) not in self._finished]

    @property
    def _finished(self) -> Any:
        return self.house.answers.finished

    def _check_answer(self, number: int, asked: Asked) -> None:
        tokens, finished = self.house.answers.tokens.get((number, 0), []), self._finished.get((number, 0))
        if finished is not None and finished.reason is FinishReason.ERROR:
            fine = asked.adapter and self._operated and any(told in (finished.message or "") for told in _TOLD)
            hold(bool(fine), "error", f"request {number} ended with {finished.message!r}")
            self.seen["turned down"] += 1
            return
        keys = {desk.keys[number] for desk in self.desks if number in desk.keys}
        hold(len(keys) == (asked.adapter is not None) or not tokens, "adapters", f"request {number} began with {keys}")
        line = Line(asked, 0, oracle.chain(asked.prompt, oracle.root(next(iter(keys), None))), self._setting.length)
        for token in tokens:
            wanted, _ = line.expect()
            hold(
                token == wanted,
                "answer",
                f"request {number}, {keys}: token {len(line.tokens)} is {token}, not {wanted}",
            )
            line.take(token)
        hold(finished is None or len(tokens) == asked.max_tokens, "answer", f"request {number}: {len(tokens)} tokens")
