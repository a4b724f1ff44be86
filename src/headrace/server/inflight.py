"""The requests that are being answered, and the last that were: what ``GET /v1/requests/{id}`` and ``explain`` know of each.

What lives here: a bounded register, and where a request's time went. What may not: asking the engine (requests.py), formats.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.output import RequestDelta
from headrace.request import Request, RequestTimes, StepAccount
from headrace.server.answers import Answer, ChoiceState, PromptState
from headrace.server.exchange import Exchange

MAX_ENDED = 256  # requests that have ended and can still be asked about


@dataclass(slots=True)
class Job:
    """One request. ``streams`` are the engine's, one a prompt, each with n choices; ``ids`` are ours, never the client's."""

    ids: tuple[str, ...]
    tenant: str
    route: str
    prompts: Sequence[PromptState | _EndedPrompt]
    choices: Sequence[ChoiceState | _EndedChoice]
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
        self.prompts = [_EndedPrompt(prompt.cached_tokens) for prompt in self.prompts]
        self.choices = [_EndedChoice(choice.num_tokens, choice.finish_reason) for choice in self.choices]
        self.streams = [None] * len(self.streams)

    def explained(self) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class _EndedPrompt:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class _EndedChoice:
    num_tokens: int
    finish_reason: str | None


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


class Inflight:
    """Requests by our own ids. Those that run are bounded by the queue, those that have ended by MAX_ENDED."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._ended: list[Job] = []  # oldest first

    @contextlib.contextmanager
    def follow(self, exchange: Exchange, answer: Answer, streams: Sequence[Any], requests: Sequence[Request], *, explain: bool) -> Iterator[Job]:
        """Known from now on; ended when the block is left."""
        ids = (answer.id,) if exchange.client_named else (answer.id, exchange.request_id)
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        structured = requests[0].params.structured_outputs is not None
        job = Job(ids, exchange.tenant, exchange.route, answer.prompts, answer.choices, streams, prompt_tokens, structured, explain)
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

    def find(self, name: str, tenant: str) -> Job | None:
        """None for an unknown one, and alike for somebody else's."""
        job = self._jobs.get(name)
        return job if job is not None and job.tenant == tenant else None

    def running(self, tenant: str) -> list[Job]:
        """Those of one tenant that have not ended, oldest first."""
        return [job for name, job in self._jobs.items() if name == job.ids[0] and job.tenant == tenant and job.ended is None]
