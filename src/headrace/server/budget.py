"""What a request's answer may cost at most, known before it is admitted; and how much of that all answers may cost together.

What lives here: prices in bytes, and the budget they are counted against. What may not: torch, rendering (answers.py), the number of
requests (service.limits.admit), the engine's own memory.

Bytes are those of the JSON; what is held to make it (scores above all) takes about as many. Text alone is priced for one answer and not held
against the budget of all: how many tokens live at once is bounded by the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.errors import InvalidRequest, Unavailable
from headrace.request import Request
from headrace.sampling_params import SamplingParams
from headrace.server.answers import Shape

TOKEN_BYTES = 8  # of text, or as an id
SCORE_BYTES = 80  # one token's logprob, with its text
_HOLDERS = 3  # of ids that a request names: this process, the scheduler, the worker
_ENTRY_BYTES = 100  # of an id with its bias, as objects
_RETRY_SECONDS = 2


def scores_at(k: int | None) -> int:
    """Bytes of one position's logprobs: the chosen token and the k best."""
    return 0 if k is None else SCORE_BYTES * (1 + k)


@dataclass(frozen=True, slots=True)
class Price:
    """Bytes. ``fixed``: of the answer, whatever is generated. ``tokens``: of what is generated, at most, of which ``scores`` are logprobs.
    ``fields``: of what is held of the request itself. ``why``: what makes most of it, the field first."""

    fixed: int
    tokens: int
    scores: int
    fields: int
    why: tuple[str, str]

    @property
    def answer(self) -> int:
        return self.fixed + self.tokens

    @property
    def reserved(self) -> int:
        return self.fixed + self.scores + self.fields


def fields_bytes(params: SamplingParams) -> int:
    """Of one prompt's parameters, in every process that holds them."""
    ids = 0 if params.allowed_token_ids is None else len(params.allowed_token_ids.packed)
    return _HOLDERS * (ids + _ENTRY_BYTES * (len(params.logit_bias or ()) + len(params.stop_token_ids)))


def price(requests: Sequence[Request], shape: Shape, *, stream: bool, echo: Sequence[int]) -> Price:
    """``echo``: bytes of each prompt's text where it is shown, else 0. Streams leave token by token, and cost what comes before that."""
    params = requests[0].params
    lengths = [len(each.prompt_token_ids) for each in requests]
    scored = scores_at(params.prompt_logprobs) if shape.prompt_logprobs and not stream else 0
    echoed_scores = scores_at(params.logprobs) if any(echo) and not stream else 0
    parts = {
        "prompt_logprobs": (scored + echoed_scores) * sum(lengths),
        "echo": sum(echo),
        "return_token_ids": TOKEN_BYTES * sum(lengths) if shape.token_ids else 0,
    }
    fixed = params.n * sum(parts.values())
    most = 0 if stream else len(requests) * params.n * (params.max_tokens or 0)
    scores = most * scores_at(params.logprobs)
    tokens = most * TOKEN_BYTES * (2 if shape.token_ids else 1) + scores
    return Price(fixed, tokens, scores, len(requests) * fields_bytes(params), _why(parts, fixed, tokens, scores, requests))


def _why(parts: dict[str, int], fixed: int, tokens: int, scores: int, requests: Sequence[Request]) -> tuple[str, str]:
    """The field to lower, and the multiplication."""
    params, prompts = requests[0].params, len(requests)
    if fixed >= tokens:
        name = max(parts, key=lambda each: parts[each])
        what = f"{parts[name]} bytes of {name}"
    else:
        name = "logprobs" if scores > tokens // 2 else "max_tokens"
        what = f"max_tokens {params.max_tokens}" + (f" with logprobs {params.logprobs}" if scores else "")
        what += f" × {prompts} prompts" if prompts > 1 else ""
    return ("n", f"n {params.n} × {what}") if params.n > 1 else (name, what)


def shortened(requests: Sequence[Request], cost: Price, limit: int) -> list[Request]:
    """With as many tokens as an answer of ``limit`` bytes holds, where nobody asked for a number of them."""
    if cost.answer <= limit or cost.fixed >= limit:
        return list(requests)
    most = max((requests[0].params.max_tokens or 1) * (limit - cost.fixed) // cost.tokens, 1, requests[0].params.min_tokens)
    return [replace(each, params=replace(each.params, max_tokens=min(most, each.params.max_tokens or most))) for each in requests]


class Budget:
    """Of one front end. ``each``: bytes of an answer, at most. What an answer holds up to ``free`` bytes is counted and never refused, so
    that large answers keep nobody from small ones."""

    def __init__(self, each: int, total: int, queue: int) -> None:
        self.each = min(each, total)
        self.total = total
        self.free = total // queue
        self.held = 0

    def check(self, cost: Price) -> None:
        """Raises InvalidRequest for more than one answer may be."""
        if cost.answer > self.each:
            field, why = cost.why
            raise InvalidRequest(
                f"The answer could have {_size(cost.answer)} ({why}), more than the {_size(self.each)} that one may have (--max-answer-bytes); "
                f"lower {field}, or stream it.",
                param=field,
            )
        if cost.fields > self.total:
            raise InvalidRequest(
                f"allowed_token_ids and logit_bias of all prompts take {_size(cost.fields)} of the {_size(self.total)} for all requests "
                "(--max-answers-bytes); send fewer prompts at once.",
                param="allowed_token_ids",
            )  # fmt: skip

    def hold(self, size: int) -> Held:
        """Raises Unavailable where so much is not left. Release it at the end."""
        held = Held(self)
        held.grow(size)
        return held


class Held:
    """One answer's part of the budget."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = 0

    def grow(self, size: int) -> None:
        """To ``size`` bytes in all. Raises Unavailable where they are not left."""
        budget = self._budget
        if size > self.size and size > budget.free and budget.held + size - self.size > budget.total:
            raise Unavailable(
                f"Answers in flight hold {_size(budget.held)} of {_size(budget.total)} (--max-answers-bytes), and this one needs {_size(size)}; "
                f"try again in {_RETRY_SECONDS} s.",
                retry_after=_RETRY_SECONDS,
            )
        self.set(max(size, self.size))

    def set(self, size: int) -> None:
        """What it turned out to be."""
        self._budget.held += size - self.size
        self.size = size

    def release(self) -> None:
        self.set(0)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} bytes"
