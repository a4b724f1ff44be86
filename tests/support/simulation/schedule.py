"""What happens to an engine, as data: its sizes and switches, and one event after the other, each with every parameter
it needs.

A schedule is drawn from a seed (drawing.py), lived through (life.py), shrunk (shrinking.py), written to a file and read
again. Nothing in it refers to a state: what an event is about may have ended or never begun, and then it does nothing.
So any event can be left out.

What lives here: the records and their text. What may not: drawing, engines.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Group:
    """One KV group. ``window``: None for full attention."""

    block_size: int
    num_blocks: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An engine's sizes and switches.

    ``step_seconds``: what a step takes on the device; ``forecast``: which the policy can foretell, more or less.
    ``weighted``: one tenant has more weight than others. ``settled``: records are looked at as they should be after
    every event; else as they lie there, so that what is made up for late (plan_builder.py) stays late. ``journalled``:
    in the end a fresh scheduler must plan the same. ``drafts``: that the device proposes for a row, at most;
    ``acceptance``: how often one is right; ``automatic``: how many is the scheduler's choice. ``adapters``: that may be
    in one step; 0: they are names of prefixes, and nothing else; ``own_blocks``: that they lie in; 0: in those of the
    first group; ``held``: in host memory at once; 0: all of them are there from the start; ``reads``: turns that reading
    one takes. ``replicas``: of these, the first computes prompts for the others; 0: there is one engine. ``ranks``: a
    second one follows the first.
    """

    depth: int = 0
    rows: int = 4
    groups: tuple[Group, ...] = (Group(4, 48),)
    length: int = 48
    budget: int = 16
    logits_rows: int = 4
    policy: str = "fcfs"
    forecast: bool = False
    max_step_ms: float | None = None
    weighted: bool = False
    chunked_prefill: bool = True
    continuous_batching: bool = True
    prefix_caching: bool = True
    paged_allocation: bool = True
    kv_caching: bool = True
    padded: bool = False
    drafts: int = 0
    acceptance: float = 0.7
    automatic: bool = False
    adapters: int = 0
    own_blocks: int = 0
    held: int = 0
    reads: int = 0
    replicas: int = 0
    ranks: bool = False
    step_seconds: float = 0.0
    settled: bool = True
    journalled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. ``compiles``: it follows a grammar, which is there after so many turns. ``client``: whose disconnect
    ends it. ``stamp``: seconds between the loop's clock and the arrival that the front end noted. ``only``: the one
    token that may come, if not -1; ``loops``: an answer that repeats itself is ended."""

    prompt: tuple[int, ...]
    max_tokens: int = 1
    n: int = 1
    priority: int = 0
    seed: int = 0
    ignore_eos: bool = True
    min_tokens: int = 0
    stops: tuple[int, ...] = ()
    salt: str = ""
    adapter: str | None = None
    logprobs: int | None = None
    scored: bool = False
    only: int = -1
    loops: bool = False
    compiles: int | None = None
    refused: bool = False
    client: int = 0
    tenant: str = ""
    ttft: float | None = None
    tpot: float | None = None
    reading_speed: float | None = None
    stamp: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """The loop takes one turn."""


@dataclass(frozen=True, slots=True)
class Add:
    """A request comes. Its number is its id, and says who came before."""

    number: int
    asked: Asked


@dataclass(frozen=True, slots=True)
class Abort:
    number: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A client goes, and with it all it has asked."""

    client: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A stop string was found: ``keep`` tokens of the answer stay, as far as so many have been told."""

    number: int
    index: int
    keep: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The next step to be submitted fails; ``written``: only after it has written keys and tokens."""

    written: bool


@dataclass(frozen=True, slots=True)
class Spoil:
    """In the next result that has so many, the logits of this sample are unusable."""

    sample: int


@dataclass(frozen=True, slots=True)
class Delay:
    """The next step takes so much longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Jump:
    """The clock jumps, forward or back."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The worker loses its rows, if nothing is in flight."""


@dataclass(frozen=True, slots=True)
class Part:
    """One replica alone takes a turn; ``tells``: what it has to say is heard."""

    number: int
    tells: bool


@dataclass(frozen=True, slots=True)
class Load:
    """An operator loads an adapter; ``fresh``: its files were replaced since."""

    name: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class Unload:
    name: str


@dataclass(frozen=True, slots=True)
class Damage:
    """The next adapter to be read cannot be."""


@dataclass(frozen=True, slots=True)
class Look:
    """Somebody asks where a request stands, and for the gauges."""

    number: int


Event = (
    Turn
    | Add
    | Abort
    | Disconnect
    | Finish
    | Fail
    | Spoil
    | Delay
    | Jump
    | Rebuild
    | Look
    | Part
    | Load
    | Unload
    | Damage
)
_ALL: tuple[type[Event], ...] = (
    Turn, Add, Abort, Disconnect, Finish, Fail, Spoil, Delay, Jump, Rebuild, Look, Part, Load, Unload, Damage,
)  # fmt: skip
KINDS = {kind.__name__.lower(): kind for kind in _ALL}
TURN = Turn()


@dataclass(frozen=True, slots=True)
class Schedule:
    """``name``: where it comes from, for people."""

    name: str
    setting: Setting
    events: tuple[Event, ...]


# --- text


def to_text(schedule: Schedule) -> str:
    """JSON with one event a line; what has its default is left out."""
    head = {"name": schedule.name, "setting": _changed(schedule.setting)}
    lines = ",\n  ".join(json.dumps(_event_data(event)) for event in schedule.events)
    return f'{json.dumps(head)[:-1]}, "events": [\n  {lines}\n]}}\n'


def from_text(text: str) -> Schedule:
    """Raises ValueError with a sentence where the text is no schedule."""
    try:
        data = json.loads(text)
        setting = dict(data["setting"])
        if "groups" in setting:
            setting["groups"] = tuple(Group(**group) for group in setting["groups"])
        return Schedule(data["name"], Setting(**setting), tuple(map(_event, data["events"])))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no schedule of events ({error}); give a file that --save wrote.") from None


def _changed(record: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, as JSON knows them."""
    return {
        each.name: _plain(getattr(record, each.name))
        for each in fields(record)
        if getattr(record, each.name) != _default(each)
    }


def _default(of: Field[Any]) -> Any:
    return of.default if of.default is not MISSING else MISSING


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _changed(value) if isinstance(value, Group) else value


def _event_data(event: Event) -> list[Any]:
    values = [getattr(event, each.name) for each in fields(event)]
    return [type(event).__name__.lower(), *(_changed(value) if isinstance(value, Asked) else value for value in values)]


def _event(data: list[Any]) -> Event:
    kind, *values = data
    if KINDS[kind] is Add:
        fields_of: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values[1].items()
        }
        values[1] = Asked(**fields_of)
    return KINDS[kind](*values)
