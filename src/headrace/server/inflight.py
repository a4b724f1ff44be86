"""The requests that are being answered, and the last that were; ``GET /v1/requests`` and ``GET /v1/requests/{id}``:
where each stands, why it waits, when it may start and, once it has ended (or asks: ``explain``), where its time went.

What lives here: a bounded register, asking the engine, the words for its numbers. What may not: the reasons
themselves (scheduler/explain.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.engine.output import RequestDelta
from headrace.errors import EngineDead, NotFound
from headrace.request import Given, Json, Request, RequestTimes, StepAccount
from headrace.server.exchange import Exchange
from headrace.server.wire import Answer, ChoiceState, PromptState

if TYPE_CHECKING:  # which holds our register
    from headrace.server.service import Service

MAX_ENDED = 256  # requests that have ended and can still be asked about

ASK_SECONDS = 1.0  # that an answer waits for an engine in a long step
MAX_ASKED = 64  # prompts of one request that the engine is asked about

SENTENCES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
)


@dataclass(slots=True)
class TrackedRequest:
    """One request. ``streams`` are the engine's, one a prompt, each with n choices; ``ids`` are ours, never the
    client's."""

    ids: tuple[str, ...]
    tenant: str
    route: str
    model: str
    prompts: Sequence[PromptState]
    choices: Sequence[ChoiceState]
    streams: Sequence[Any]
    prompt_tokens: int
    structured: bool  # a grammar is compiled before it can start
    explain: bool
    client_request_id: str | None = None  # for the client to tell its requests apart; it is never a key
    created: int = field(default_factory=lambda: int(time.time()))
    arrival: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    times: dict[int, RequestTimes] = field(default_factory=dict)  # by choice
    accounts: dict[int, StepAccount] = field(default_factory=dict)  # by stream

    @property
    def n(self) -> int:
        return len(self.choices) // len(self.streams)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def take(self, choice: int, delta: RequestDelta) -> None:
        """The last delta of a choice."""
        if delta.times is not None:
            self.times[choice] = delta.times
        if delta.account is not None:
            self.accounts[choice // self.n] = delta.account

    def end(self) -> None:
        """Only numbers are kept."""
        self.ended = time.perf_counter()
        self.prompts = [PromptState((), cached_tokens=prompt.cached_tokens) for prompt in self.prompts]
        self.choices = [
            ChoiceState(self.prompts[0], num_tokens=each.num_tokens, finish_reason=each.finish_reason)
            for each in self.choices
        ]
        self.streams = [None] * len(self.streams)

    def explained(self) -> Json:
        """Where the time went: of the whole request, from the first of its answers to begin to the last to end."""
        times, accounts = list(self.times.values()), list(self.accounts.values())
        arrival = min((each.arrival for each in times), default=None)
        scheduled, first = _least(each.first_scheduled for each in times), _least(each.first_token for each in times)
        finished = max((each.finished for each in times if each.finished is not None), default=None)
        shares = [(each.limit_share, each.steps) for each in accounts if each.limit_share is not None]
        weight = sum(steps for _, steps in shares)
        return {
            "queue_seconds": _between(arrival, scheduled),
            "prefill_seconds": _between(scheduled, first),
            "decode_seconds": _between(first, finished),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(prompt.cached_tokens for prompt in self.prompts),
            "completion_tokens": self.completion_tokens,
            "preemptions": sum(each.preemptions for each in accounts) if accounts else None,
            "steps": sum(each.steps for each in accounts) if accounts else None,
            "limit_share": sum(share * steps for share, steps in shares) / weight if weight else None,
        }


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


class Inflight:
    """Requests by our own ids. Those that run are bounded by the queue, those that have ended by MAX_ENDED."""

    def __init__(self) -> None:
        self._jobs: dict[str, TrackedRequest] = {}
        self._ended: list[TrackedRequest] = []  # oldest first

    @contextlib.contextmanager
    def follow(
        self, exchange: Exchange, answer: Answer, streams: Sequence[Any], requests: Sequence[Request]
    ) -> Iterator[TrackedRequest]:
        """Known from now on; ended when the block is left."""
        ids = (answer.id,) if exchange.client_named else (answer.id, exchange.request_id)
        count, first = sum(len(request.prompt_token_ids) for request in requests), requests[0]
        held, explain = first.params.structured_outputs is not None, first.explain
        job = TrackedRequest(
            ids, exchange.tenant, exchange.route, answer.options.model, answer.prompts, answer.choices, streams, count,
            held, explain,
        )  # fmt: skip
        job.client_request_id = exchange.request_id if exchange.client_named else None
        self._jobs.update(dict.fromkeys(ids, job))
        try:
            yield job
        finally:
            job.end()
            self._ended.append(job)
            for old in self._ended[:-MAX_ENDED]:
                for name in old.ids:
                    self._jobs.pop(name, None)
            del self._ended[:-MAX_ENDED]

    def find(self, name: str, tenant: str) -> TrackedRequest | None:
        """None for an unknown one, and for another tenant's."""
        job = self._jobs.get(name)
        return job if job is not None and job.tenant == tenant else None

    def running(self, tenant: str) -> list[TrackedRequest]:
        """Those of one tenant that have not ended, oldest first."""
        return [
            job for name, job in self._jobs.items() if name == job.ids[0] and job.tenant == tenant and job.ended is None
        ]


# --- the routes


async def list_requests(service: Service, exchange: Exchange) -> None:
    others = await service.others("list_requests", exchange.tenant)
    shown = [*running(service, exchange.tenant), *itertools.chain(*others)]
    await exchange.reply_json({"object": "list", "data": sorted(shown, key=lambda each: -float(each["seconds"]))})


def running(service: Service, tenant: str) -> list[Json]:
    """One tenant's, of this service, the oldest first."""
    return [_head(job) for job in service.observed.inflight.running(tenant)]


async def show_request(service: Service, exchange: Exchange) -> None:
    name = exchange.named
    shown = await service.first("find_request", name, exchange.tenant)
    if shown is None:
        told = f"There is no request {name[:100]!r} of yours, or it ended long ago; see /v1/requests."
        raise NotFound(told, param="id", code="request_not_found")
    await exchange.reply_json(shown)


async def progress_of(service: Service, name: str, tenant: str) -> Json | None:
    """A request of this service; None for an unknown one, and for another tenant's."""
    job = service.observed.inflight.find(name, tenant)
    if job is None:
        return None
    if job.ended is not None:
        return {**_head(job), "explain": job.explained()}
    left = [
        stream
        for index, stream in enumerate(job.streams)
        if any(c.finish_reason is None for c in job.choices[index * job.n :][: job.n])
    ]
    states = await _ask(service, left[:MAX_ASKED], "requests")
    if not states and left and service.model.found is not None and service.model.found.asleep:
        shown = {**_head(job), "waits_for": _wait("waking", {})}
    else:
        shown = {**_head(job), **_progress(job, [state for state in states if state is not None])}
    if service.wake_status is not None and shown.get("waits_for", {}).get("kind") in ("asleep", "waking"):
        shown["waits_for"]["text"] = service.wake_status()
    return shown


async def explained(service: Service, job: TrackedRequest) -> Json | None:
    """Where a request's time went, if it asked. An answer that ended at a stop string does not bring its steps: the
    engine knows them."""
    if not job.explain:
        return None
    missing = [index for index in range(len(job.streams)) if index not in job.accounts][:MAX_ASKED]
    accounts = await _ask(service, [job.streams[index] for index in missing], "accounts")
    job.accounts.update(
        {index: StepAccount(**each) for index, each in zip(missing, accounts, strict=False) if each is not None}
    )
    return job.explained()


async def _ask(service: Service, streams: Sequence[Any], what: str) -> list[Given | None]:
    """What the engine says of each; nothing when it is in a step that takes long."""
    with contextlib.suppress(TimeoutError, EngineDead):
        if streams and service.model.found is not None:
            return list((await asyncio.wait_for(service.model.found.explain(streams), ASK_SECONDS))[what])
    return []


def _head(job: TrackedRequest) -> Json:
    reasons = [choice.finish_reason for choice in job.choices]
    return {
        "id": job.ids[0],
        "object": "request",
        "client_request_id": job.client_request_id,
        "route": job.route,
        "model": job.model,
        "created": job.created,
        "state": "finished" if job.ended is not None else "running" if job.completion_tokens else "waiting",
        "seconds": (time.perf_counter() if job.ended is None else job.ended) - job.arrival,
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "finish_reasons": reasons,
    }


def _progress(job: TrackedRequest, states: list[Given]) -> Json:
    """Of several prompts the first that waits stands for all."""
    waiting = [state for state in states if not state["running"]]
    if not states:
        return {"waits_for": _wait("grammar", {})} if job.structured and not job.completion_tokens else {}
    running = len(states) - len(waiting)
    shown: Json = {
        "state": "running" if running or job.completion_tokens else "waiting",
        "prompts": {"waiting": len(waiting), "running": running, "all": len(job.streams)},
        "computed_prompt_tokens": sum(state["num_computed"] for state in states),
        "cached_tokens": sum(state["num_cached"] for state in states),
        "preemptions": sum(state["num_preemptions"] for state in states),
    }
    if drafts := states[0].get("drafts"):
        shown["speculation"] = drafts
    return {**shown, **_queued(waiting[0])} if waiting else shown


def _queued(state: Given) -> Json:
    wait = state["wait"] or {"kind": "next_step"}
    return {
        "queue": {"position": state["position"], "length": state["num_waiting"], "overtaken_by": state["later_first"]},
        "waits_for": _wait(wait["kind"], wait, state),
        "predicted_start": _prediction(state),
    }


def _wait(kind: str, numbers: Given, state: Given | None = None) -> Json:
    text = SENTENCES["waits"][kind].format_map({"needed": 0, "available": 0, **numbers})
    others = state["position"] - 1 if state is not None else 0
    if others and state is not None:
        policy = f", {state['later_first']} of which came later (policy)" if state["later_first"] else ""
        text = f"{others} requests are before it{policy}. {text}"
        kind = "policy" if state["later_first"] else kind
    return {"kind": kind, "needed": numbers.get("needed", 0), "available": numbers.get("available", 0), "text": text}


def _prediction(state: Given) -> Json:
    earliest, latest = state["earliest"], state["latest"]
    basis = f"the pace of the last {state['steps_measured']} steps"
    if state["wait"] is not None and state["wait"]["kind"] == "asleep":
        earliest, latest, text = None, None, "Once its model is awake."
    elif earliest is None:
        text = "Nothing is known yet: no step has been measured."
    elif latest is None:
        text = f"Not before {earliest:.2f} s, from {basis}; no later bound: it depends on who comes and how long the answers before it become."
    else:
        text = (
            f"Between {earliest:.2f} s and {latest:.2f} s, from {basis}: the later if all before it use up max_tokens."
        )
    return {"earliest_seconds": earliest, "latest_seconds": latest, "tokens_ahead": state["tokens_ahead"], "text": text}
