"""The adapters that an engine knows, and the requests that wait until theirs is in host memory.

What lives here: names, loading ahead of a request's turn, who makes room for whom. What may not: torch, files (peft.py
behind ``check``), slots of the device (cache/adapters.py).

A name that is taken away and comes back stands for other weights, perhaps. So an adapter has a key, its name and what
tells its files from others', and that is what prefixes are cached under: it is the same in all replicas of a host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from headrace.config import check_adapter_name
from headrace.engine.executor import AdapterOutcome, Control, DropAdapter, LoadAdapter
from headrace.errors import ConfigError, InvalidRequest, NotFound
from headrace.request import Request, adapter_name
from headrace.scheduler.events import AddRequest, RefuseRequest

_READ_AHEAD = 32  # adapters: of what is read, nobody knows the size


@dataclass(frozen=True, slots=True)
class Registered:
    key: str
    folder: str


class AdapterRegistry:
    """``check`` raises HeadraceError for a folder that is no adapter of this model. ``control``: the executor's.
    ``most_held``: adapters in host memory at once; ``most_blocks``: that they take together, but for those
    that are read just now. ``folder``: a name that is not registered is looked for there. ``identify``: what tells a
    folder's adapter from others; ``file_identity`` if not said.

    Who waits first gets room first: while a request finds none, the adapter that was used longest ago takes no new
    requests, and gives its place once those it has are done.
    """

    def __init__(
        self,
        check: Callable[[str], object],
        control: Callable[[Control], None],
        most_held: int,
        folder: str | None = None,
        most_blocks: int | None = None,
        identify: Callable[[str], str] | None = None,
    ) -> None:
        self._check = check
        self._control = control
        self._most_held = most_held
        self._most_blocks = most_blocks
        self._folder = None if folder is None else Path(folder)
        self._identify = identify or file_identity
        self._known: dict[str, Registered] = {}
        self._held: dict[str, str] = {}  # key → folder, loaded or coming; used longest ago first
        self._coming: set[str] = set()
        self._waiting: dict[int, Request] = {}  # by id, in order of arrival; ``adapter`` is a key already
        self._wanted: set[str] = set()  # keys that nobody asks for yet, but somebody waits to hear of
        self._failed: dict[str, str] = {}
        self._replaced: dict[str, Registered] = {}  # what a name stood for, by the key of what has replaced it unread
        self._blocks: dict[str, int] = {}  # of a device, that each takes which was ever read
        self._closing: str | None = None
        self.num_loads = 0

    # --- names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._known)

    @property
    def num_held(self) -> int:
        """In host memory, or on their way there."""
        return len(self._held)

    def register(self, name: str, folder: str) -> str:
        """Returns the key. Raises InvalidRequest for a name that is taken, HeadraceError for what is no adapter."""
        known = self._known.get(name)
        if known is not None and known.folder == folder:
            return known.key
        if known is not None:
            raise InvalidRequest(
                f"An adapter {name!r} is there already, from another folder; unload it first.", param="lora_name"
            )
        self._check(folder)
        return self._enter(name, folder).key

    def load(self, name: str, folder: str, in_place: bool | None) -> None:
        """The name stands for ``folder`` as it is from now on. ``in_place``: as frames.LoadAdapter has it. Raises as
        ``require`` does."""
        known = self._known.get(check_adapter_name(name))
        if known is None or in_place is None:
            self.require(name, folder)
        elif not in_place:
            raise InvalidRequest(
                f"The adapter {name!r} is loaded already; give load_inplace to load it again, or unload it first.",
                param="lora_name",
            )
        else:
            self._check(folder := folder or known.folder)
            self._replaced[self._enter(name, folder).key] = known

    def require(self, name: str, folder: str = "") -> None:
        """It is known from now on. Raises InvalidRequest, and what ``register`` raises."""
        if folder:
            self.register(check_adapter_name(name), folder)
        elif name not in self._known and self._found(name) is None:
            raise InvalidRequest(
                f"There is no adapter {name[:100]!r}; see /v1/models.", param="model", code="model_not_found"
            )

    def unregister(self, name: str) -> None:
        """Requests that have it go on; new ones are refused. Raises NotFound."""
        if self._known.pop(name, None) is None and self._in_folder(name) is None:
            raise NotFound(
                f"There is no adapter {name[:100]!r}; see /v1/models.", param="lora_name", code="adapter_not_found"
            )

    def key(self, name: str) -> str:
        """What a request for it that begins now would have as its adapter; the name of one that is not known."""
        known = self._known.get(name) or self._found(name)
        return name if known is None else known.key

    def forget(self, key: str) -> None:
        """One that could not be read, unless its name stands for another by now; then for what it stood for before."""
        name = adapter_name(key)
        if name in self._known and self._known[name].key == key:
            del self._known[name]
            if key in self._replaced:
                self._known[name] = self._replaced[key]

    def forget_held(self) -> None:
        """What is in host memory is gone: whoever wants one brings it again."""
        self._held.clear()

    def preload(self, name: str) -> str:
        """Brings it into host memory though nobody asks for it yet; ``verdict`` of the key tells how that went."""
        known = self._known[name]
        if known.key not in self._held:
            self._wanted.add(known.key)
        return known.key

    def verdict(self, key: str) -> str | None:
        """What is wrong with it; "" where it has come, None where it is still to come."""
        if key in self._failed:
            return self._failed[key]
        return None if key in self._coming or key in self._wanted else ""

    # --- requests

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._coming or self._wanted)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting.values())

    def begin(self, request: Request) -> None:
        """It comes back out of ``take_ready``. Raises InvalidRequest for an unknown adapter."""
        self.require(request.adapter or "")
        self._waiting[request.request_id] = replace(request, adapter=self._known[request.adapter or ""].key)

    def _found(self, name: str) -> Registered | None:
        """In the folder; it is looked into when it is read."""
        found = self._in_folder(name)
        return None if found is None else self._enter(name, str(found))

    def _in_folder(self, name: str) -> Path | None:
        return None if self._folder is None else adapter_folder(self._folder, name)

    def _enter(self, name: str, folder: str) -> Registered:
        """What could not be read before is tried again."""
        known = self._known[name] = Registered(self._key(name, folder), folder)
        self._failed.pop(known.key, None)
        self._replaced.pop(known.key, None)
        return known

    def _key(self, name: str, folder: str) -> str:
        return f"{name}#{self._identify(folder)}"

    def _fail(self, key: str, error: str) -> None:
        """What was found in the folder is looked for there anew when the next request comes."""
        self._failed[key], name = error, adapter_name(key)
        known = self._known.get(name)
        if known is not None and (key in self._replaced or known.folder == str(self._in_folder(name))):
            self.forget(key)

    def _change(self, key: str, now: str) -> None:
        """The name stands for other files by now, whose prefixes are others."""
        self._wanted = {now if each == key else each for each in self._wanted}
        for request in self.waiting:
            if request.adapter == key:
                self._waiting[request.request_id] = replace(request, adapter=now)

    def drop(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)

    def take_ready(
        self, outcomes: Iterable[AdapterOutcome], in_use: Collection[str]
    ) -> list[AddRequest | RefuseRequest]:
        """Those whose adapter has come, or could not. ``in_use``: keys of requests that have not ended."""
        for outcome in outcomes:
            self._coming.discard(outcome.name)
            self._blocks[outcome.name] = outcome.blocks
            if outcome.error is not None:  # its clients learn no path
                folder, name = self._held.pop(outcome.name, ""), adapter_name(outcome.name)
                self._fail(outcome.name, outcome.error.replace(folder, name) if folder else outcome.error)
            else:
                self._replaced.pop(outcome.name, None)
        if self._closing is not None and not self._is_lacking(self._closing):
            self._closing = None
        ready: list[AddRequest | RefuseRequest] = []
        for request in self.waiting:
            key = request.adapter or ""
            if key in self._failed:
                ready.append(RefuseRequest(request, self._failed[key], param="model"))
            elif key in self._held and key not in self._coming and key != self._closing:
                self._held[key] = self._held.pop(key)  # used last
                ready.append(AddRequest(request, self._blocks[key]))
        for event in ready:
            del self._waiting[event.request.request_id]
        self._make_room({*in_use, *(event.request.adapter or "" for event in ready)})
        return ready

    def _make_room(self, in_use: Collection[str]) -> None:
        """Loads begin in the order of their requests, as far as there is room."""
        wanted = [request.adapter or "" for request in self.waiting]
        for key in dict.fromkeys((*wanted, *self._wanted)):
            if key in self._held or key in self._failed:
                self._wanted.discard(key)
                continue
            known = self._known.get(name := adapter_name(key)) or self._found(name)
            if known is None:
                self._fail(key, f"The adapter {name!r} was unloaded before its turn. Load it again.")
                continue
            if self._key(name, known.folder) != key:
                before, known = key, self._enter(name, known.folder)
                self._change(before, key := known.key)
                if key in self._held:
                    continue
            if len(self._coming) == _READ_AHEAD:
                return
            while self._is_full():
                if not self._evict(in_use):
                    return
            self._held[key] = known.folder
            self._coming.add(key)
            self._wanted.discard(key)
            self.num_loads += 1
            self._control(LoadAdapter(key, known.folder))

    def _is_full(self) -> bool:
        if len(self._held) >= self._most_held:
            return True
        return (
            self._most_blocks is not None and sum(self._blocks.get(key, 0) for key in self._held) >= self._most_blocks
        )

    def _is_lacking(self, closing: str) -> bool:
        wanted = {*self._wanted, *(request.adapter or "" for request in self._waiting.values())}
        return closing in self._held and not wanted <= self._held.keys()

    def _evict(self, in_use: Collection[str]) -> bool:
        victim = next((key for key in self._held if key not in self._coming and key not in in_use), None)
        if victim is None:
            self._closing = self._closing or next((key for key in self._held if key not in self._coming), None)
            return False
        del self._held[victim]
        if victim == self._closing:
            self._closing = None
        self._control(DropAdapter(victim))
        return True


def file_identity(folder: str) -> str:
    """Of the adapter that lies there now: files that were written again or replaced are others, even if they have the
    same size and date. They are not read for it."""
    digest = blake2b(folder.encode(), digest_size=8)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        try:
            found = os.stat(Path(folder) / name)
        except OSError:  # nor can it be read
            continue
        digest.update(f"\n{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}".encode())
    return digest.hexdigest()


def adapter_folder(parent: Path, name: str) -> Path | None:
    """``name`` within ``parent``, if it is an adapter's folder; a name cannot reach outside."""
    try:
        folder = parent / check_adapter_name(name)
    except ConfigError:
        return None
    return folder if (folder / "adapter_config.json").is_file() else None


def adapter_names(parent: Path) -> list[str]:
    """All that ``adapter_folder`` finds there."""
    try:
        return sorted(each.name for each in parent.iterdir() if adapter_folder(parent, each.name) is not None)
    except OSError:
        return []
