"""``GET /v1/requests`` and ``GET /v1/requests/{id}``: where a request stands, why it waits, and when it may start.

What lives here: asking the engine, and the words for its numbers. What may not: the reasons themselves (scheduler/explain.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from headrace.errors import EngineDead, NotFound
from headrace.request import StepAccount
from headrace.server.exchange import Exchange
from headrace.server.inflight import Job
from headrace.server.service import Service

ASK_SECONDS = 1.0  # that an answer waits for an engine in a long step
MAX_ASKED = 64  # prompts of one request that the engine is asked about

_WAITS = {
    "next_step": "It starts with the next step.",
    "batch": "Static batching: it waits for the running batch ({available} sequences) to end.",
    "result": "It was pushed out a moment ago and waits for the result of a step that still computes it.",
    "rows": "The first that cannot start needs {needed} of the rows for running sequences (--max-num-seqs), and {available} are free.",
    "token_budget": "Those who run take all tokens of a step (--max-num-batched-tokens); the others get what they leave.",
    "time": "Steps beside answers may take {needed} ms (--max-step-ms), and prompts before it take all tokens that fit in those.",
    "blocks": "The first that cannot start needs {needed} KV blocks, and {available} can be had.",
    "grammar": "Its grammar is being compiled.",
}


async def list_requests(service: Service, exchange: Exchange) -> None:
    shown = [*running(service, exchange.tenant), *await service.commons.list_requests(exchange.tenant)]
    await exchange.reply_json({"object": "list", "data": sorted(shown, key=lambda each: -float(each["seconds"]))})


def running(service: Service, tenant: str) -> list[dict[str, Any]]:
    """One tenant's, of this front end."""
    return [_head(job) for job in service.inflight.running(tenant)]


async def show_request(service: Service, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/requests/")
    shown = await standing(service, name, exchange.tenant) or await service.commons.find_request(name, exchange.tenant)
    if shown is None:
        raise NotFound(f"There is no request {name[:100]!r} of yours, or it ended long ago; see /v1/requests.", param="id", code="request_not_found")
    await exchange.reply_json(shown)


async def standing(service: Service, name: str, tenant: str) -> dict[str, Any] | None:
    """A request of this front end; None for an unknown one, and alike for somebody else's."""
    job = service.inflight.find(name, tenant)
    if job is None:
        return None
    if job.ended is not None:
        return {**_head(job), "explain": job.explained()}
    return {**_head(job), **_standing(job, await _ask(service, job))}


async def explained(service: Service, job: Job) -> dict[str, Any] | None:
    """Where a request's time went, if it asked. An answer that ended at a stop string does not bring its steps: the engine knows them."""
    if not job.explain:
        return None
    missing = [index for index in range(len(job.streams)) if index not in job.accounts][:MAX_ASKED]
    with contextlib.suppress(TimeoutError, EngineDead):
        if missing and service.found_engine is not None:
            answer = await asyncio.wait_for(service.found_engine.explain([job.streams[index] for index in missing]), ASK_SECONDS)
            found = zip(missing, answer["accounts"], strict=True)
            job.accounts.update({index: StepAccount(**account) for index, account in found if account is not None})
    return job.explained()


def _head(job: Job) -> dict[str, Any]:
    reasons = [choice.finish_reason for choice in job.choices]
    return {
        "id": job.ids[0],
        "object": "request",
        "client_request_id": job.client_request_id,
        "route": job.route,
        "created": job.created,
        "state": "finished" if job.ended is not None else "running" if job.completion_tokens else "waiting",
        "seconds": (time.perf_counter() if job.ended is None else job.ended) - job.arrival,
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "finish_reasons": reasons,
    }


async def _ask(service: Service, job: Job) -> list[Mapping[str, Any]]:
    """What the engine says of those prompts that have not ended; nothing when it is in a step that takes long."""
    n = job.n
    left = [stream for index, stream in enumerate(job.streams) if any(c.finish_reason is None for c in job.choices[index * n : index * n + n])]
    with contextlib.suppress(TimeoutError, EngineDead):
        if left and service.found_engine is not None:
            answer = await asyncio.wait_for(service.found_engine.explain(left[:MAX_ASKED]), ASK_SECONDS)
            return [each for each in answer["requests"] if each is not None]
    return []


def _standing(job: Job, states: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several prompts the first that waits stands for all."""
    waiting = [state for state in states if not state["running"]]
    if not states:
        return {"waits_for": _wait("grammar", {})} if job.structured and not job.completion_tokens else {}
    running = len(states) - len(waiting)
    shown: dict[str, Any] = {
        "state": "running" if running or job.completion_tokens else "waiting",
        "prompts": {"waiting": len(waiting), "running": running, "all": len(job.streams)},
        "computed_prompt_tokens": sum(state["num_computed"] for state in states),
        "cached_tokens": sum(state["num_cached"] for state in states),
        "preemptions": sum(state["num_preemptions"] for state in states),
    }
    return {**shown, **_queued(waiting[0])} if waiting else shown


def _queued(state: Mapping[str, Any]) -> dict[str, Any]:
    wait = state["wait"] or {"kind": "next_step"}
    return {
        "queue": {"position": state["position"], "length": state["num_waiting"], "overtaken_by": state["later_first"]},
        "waits_for": _wait(wait["kind"], wait, state),
        "predicted_start": _prediction(state),
    }


def _wait(kind: str, numbers: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    text = _WAITS[kind].format_map({"needed": 0, "available": 0, **numbers})
    others = state["position"] - 1 if state is not None else 0
    if others and state is not None:
        policy = f", {state['later_first']} of which came later (policy)" if state["later_first"] else ""
        text = f"{others} requests are before it{policy}. {text}"
        kind = "policy" if state["later_first"] else kind
    return {"kind": kind, "needed": numbers.get("needed", 0), "available": numbers.get("available", 0), "text": text}


def _prediction(state: Mapping[str, Any]) -> dict[str, Any]:
    earliest, latest = state["earliest"], state["latest"]
    basis = f"the pace of the last {state['steps_measured']} steps"
    if earliest is None:
        text = "Nothing is known yet: no step has been measured."
    elif latest is None:
        text = f"Not before {earliest:.2f} s, from {basis}; no later bound: it depends on who comes and how long the answers before it become."
    else:
        text = f"Between {earliest:.2f} s and {latest:.2f} s, from {basis}: the later if all before it use up max_tokens."
    return {"earliest_seconds": earliest, "latest_seconds": latest, "tokens_ahead": state["tokens_ahead"], "text": text}
