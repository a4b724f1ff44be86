"""The real desk of adapters, whose every move is judged: who waits first gets room first, nobody waits for ever, and a
request gets the adapter that its name stands for.

What lives here: judging what the desk decides. What may not: slots and blocks (books.py), reading (device.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any

from headrace.engine import connection as frames
from headrace.engine.core import EngineCore
from headrace.engine.executor import AdapterOutcome, Control, LoadAdapter
from headrace.engine.loop import EngineLoop
from headrace.errors import InvalidRequest
from headrace.lora.registry import AdapterRegistry, Registered
from headrace.request import Request, adapter_name
from headrace.scheduler.events import AddRequest, RefuseRequest
from tests.support.simulation.answers import Answers
from tests.support.simulation.broken import hold
from tests.support.simulation.device import DAMAGED, Device, slots_of
from tests.support.simulation.oracle import ADAPTERS, key_of
from tests.support.simulation.schedule import Setting

UNLOADED = "was unloaded before its turn"


class WatchedDesk(AdapterRegistry):
    """``files``: how often operators have replaced those of each name, which is its folder's, too."""

    def __init__(self, setting: Setting, device: Device, answers: Answers) -> None:
        self.slots = slots_of(setting)
        super().__init__(lambda folder: None, self._order, self.slots, identify=lambda folder: f"{self.files[folder]}")
        self._device, self._answers = device, answers
        self.files = dict.fromkeys(ADAPTERS, 0)
        self._served: dict[str, str] = {}  # name → key
        self._unloaded: set[str] = set()  # keys
        self._before: set[str] = set()  # held when the turn began
        self._first: int | None = None  # of those that wait, whose adapter finds no room
        self._closed: set[str] = set()  # keys that nobody new has got since then

    # --- names

    def _enter(self, name: str, folder: str) -> Registered:
        known = super()._enter(name, folder)
        self._served[name] = known.key
        return known

    def unregister(self, name: str) -> None:
        super().unregister(name)
        self._unloaded.add(self._served.pop(name))

    def forget(self, key: str) -> None:
        super().forget(key)
        name = adapter_name(key)
        if self._served.get(name) == key:
            self._unloaded.add(self._served.pop(name))
            if name in self._known:
                self._served[name] = self._known[name].key

    # --- requests

    def begin(self, request: Request) -> None:
        """One that is refused with a grammar comes out of the scheduler; else it does not come so far."""
        number, wanted = request.request_id, self._served.get(request.adapter or "")
        try:
            super().begin(request)
        except InvalidRequest as error:
            hold(wanted is None, "adapters", f"request {number}: {error}, and {wanted} is there")
            self._answers.turn_down(number, error.message)
            if request.params.structured_outputs is not None:
                self._answers.enter(number)
            raise
        key = self._waiting[number].adapter
        hold(key == wanted, "adapters", f"request {number} gets {key}, and its adapter's name stands for {wanted}")
        self._answers.name(number, key or "")

    def take_ready(
        self, outcomes: Iterable[AdapterOutcome], in_use: Collection[str]
    ) -> list[AddRequest | RefuseRequest]:
        self._before = set(self._held)
        ready = super().take_ready(outcomes, in_use)
        for event in ready:
            if isinstance(event, RefuseRequest):
                self._judge_refusal(event)
            self._answers.enter(event.request.request_id)
        self._judge_patience({event.request.adapter or "" for event in ready if isinstance(event, AddRequest)})
        return ready

    def _change(self, key: str, now: str) -> None:
        super()._change(key, now)
        for each in self.waiting:
            if each.adapter == now:
                self._answers.name(each.request_id, now)

    def _judge_refusal(self, event: RefuseRequest) -> None:
        key, message = event.request.adapter or "", event.message
        right = (DAMAGED in message and key in self._device.damaged) or (UNLOADED in message and key in self._unloaded)
        hold(right, "adapters", f"request {event.request.request_id}: {message!r}, and nothing is wrong with {key}")
        self._answers.turn_down(event.request.request_id, message)

    def _judge_patience(self, begun: set[str]) -> None:
        """While the first one that finds no room waits, some adapter gets nobody new, until it gives its place."""
        first = next((each.request_id for each in self.waiting if each.adapter not in self._held), None)
        if first is None or first != self._first:  # that adapter is chosen with the next turn
            self._first, self._closed = first, set()
            return
        if not self._closed:
            self._closed = self._held.keys() - self._coming
            return
        self._closed -= begun
        hold(
            bool(self._closed), "starved", f"request {first} waits for its adapter, and requests pass it for all others"
        )

    def _order(self, order: Control) -> None:
        """Adapters are read in the order of the requests that want them; one of them may be that which makes room."""
        if isinstance(order, LoadAdapter):
            files = key_of(order.folder, self.files[order.folder])
            hold(files == order.name, "adapters", f"{files} is read as {order.name}")
            for each in self.waiting:
                if each.adapter == order.name:
                    break
                early = each.adapter in self._before or each.adapter in self._held or each.adapter in self._failed
                hold(early, "order", f"{order.name} is read before {each.adapter}, which is wanted for longer")
        self._device.control(order)

    @property
    def progress(self) -> tuple[int, ...]:
        """It changes in each turn in which something happens."""
        return self.num_loads, len(self._failed), len(self._waiting), len(self._wanted), len(self._device.reading)


class Operator:
    """Whoever loads adapters and unloads them, by way of the engine's loop."""

    def __init__(self, core: EngineCore, desk: WatchedDesk) -> None:
        self._core, self.desk = core, desk
        self.loop = EngineLoop(SimpleNamespace(core=core), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        self._link: Any = SimpleNamespace(send=lambda data: None)

    def load(self, name: str, *, fresh: bool) -> None:
        """``fresh``: its files were replaced since, and every other time this is said."""
        self.desk.files[name] += fresh
        in_place = fresh and self.desk.files[name] % 2 == 0
        self.loop._load_adapter(self._link, frames.LoadAdapter(0, name, name, in_place or None))
        if not self._core.has_work:  # no turn follows
            self.turn()

    def unload(self, name: str) -> None:
        self.loop._unload_adapter(self._link, frames.UnloadAdapter(0, name))

    def turn(self) -> None:
        if self.loop._asked:
            self.loop._answer()

    def check(self, live: Iterable[Request]) -> None:
        """Who runs has its adapter in host memory, which holds no more than it may."""
        device = self.desk._device
        for request in live:
            here = request.adapter is None or device.holds_adapter(request.adapter)
            hold(here, "adapters", f"request {request.request_id} runs, and {request.adapter} is not in host memory")
        hold(
            device.num_adapters <= self.desk.slots, "adapters", f"{device.num_adapters} in memory of {self.desk.slots}"
        )
