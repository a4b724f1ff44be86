"""What was asked, and what has been told: every output is the next of an open answer, and an answer ends once, where
and why it must.

What lives here: requests as they stand from outside, and what each output is held against. What may not: events, the
engine's inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headrace.request import REPETITION, Finished, FinishReason, SequenceOutput
from tests.support.simulation import oracle
from tests.support.simulation.broken import Broken, hold
from tests.support.simulation.device import UNUSABLE, Device
from tests.support.simulation.masks import REFUSAL
from tests.support.simulation.oracle import Library, Line
from tests.support.simulation.order import OrderWatch
from tests.support.simulation.schedule import Asked, Setting


@dataclass(slots=True)
class Standing:
    """What is known of one request from outside."""

    number: int
    asked: Asked
    open: set[int]  # answers that have not ended
    entered: bool = False  # handed to the scheduler
    turned_down: str = ""  # with these words, because of its adapter
    doomed: bool = False  # whoever asked has gone, and is told nothing more once the scheduler knows
    cut: dict[int, int] = field(default_factory=dict)  # answer → tokens that stay


class Answers:
    """``limit``: tokens that a sequence of a request may have. ``there``: the requests that the scheduler must know. ``seen``: counts
    what happens."""

    def __init__(
        self, setting: Setting, device: Device, watch: OrderWatch, limit: Callable[[Asked], int], seen: Counter[str]
    ) -> None:
        self.standing: dict[int, Standing] = {}
        self.lines: dict[tuple[int, int], Line] = {}
        self.there: set[int] = set()
        self._setting, self._device, self._watch = setting, device, watch
        self._limit = limit
        self._seen = seen
        self._library = Library()
        self._scored: dict[int, int] = {}
        self._wishes: list[Standing] = []  # with aborts and stops that the scheduler may not have taken yet

    # --- what is asked

    def ask(self, number: int, asked: Asked) -> None:
        self.standing[number] = Standing(number, asked, set(range(asked.n)))
        self._draw_lines(number, asked)

    def name(self, number: int, key: str) -> None:
        """Which adapter its own stands for, from now on."""
        standing = self.standing[number]
        standing.asked = replace(standing.asked, adapter=key)
        self._draw_lines(number, standing.asked)

    def turn_down(self, number: int, message: str) -> None:
        """It must be refused with these words."""
        self.standing[number].turned_down = message
        self._seen["turned down"] += 1

    def _draw_lines(self, number: int, asked: Asked) -> None:
        prompt = oracle.chain(asked.prompt, oracle.root(asked.adapter if self._setting.adapters else None))
        for index in range(asked.n):
            self.lines[number, index] = line = Line(asked, index, prompt, self._limit(asked))
            self._library.add(line)

    def enter(self, number: int) -> None:
        """It is the scheduler's from now on. Who is refused at once is in nobody's way."""
        standing = self.standing[number]
        standing.entered = True
        self.there.add(number)
        if not self.refusal(standing):
            self._watch.arrived(number, standing.asked)

    def refusal(self, standing: Standing) -> str:
        """A part of what it must be refused with; empty where it must not be."""
        asked = standing.asked
        if asked.refused or standing.turned_down:
            return standing.turned_down or REFUSAL
        if not 1 <= len(asked.prompt) < self._limit(asked):
            return "the prompt has"
        return "n is" if asked.n > self._setting.rows else ""

    def leave(self, number: int) -> None:
        """Nobody wants it any more."""
        standing = self.standing.get(number)
        if standing is not None and standing.open:
            standing.doomed = True
            self._wishes.append(standing)
            self._watch.gone(number)
            self._seen["aborts"] += 1

    def try_cut(self, number: int, index: int, keep: int) -> int | None:
        """How many tokens stay, if this answer can be cut: it is told of, has not ended, and was not cut before."""
        standing, line = self.standing.get(number), self.lines.get((number, index))
        if (
            standing is None
            or line is None
            or standing.doomed
            or index not in standing.open
            or index in standing.cut
            or not line.tokens
        ):
            return None
        standing.cut[index] = min(keep, len(line.tokens))
        self._wishes.append(standing)
        self._seen["stops"] += 1
        return standing.cut[index]

    def settle(self) -> None:
        """The scheduler has taken its events: aborts and stops have happened."""
        for standing in self._wishes:
            for index in list(standing.open) if standing.doomed else standing.cut:
                self._ended(index, standing)
        self._wishes.clear()

    # --- what is told

    def take(self, output: SequenceOutput) -> None:
        """One output: it is of an open answer, its tokens are the next ones, and it ends where it must."""
        key, standing = (output.request_id, output.index), self.standing[output.request_id]
        if output.index not in standing.open:
            if standing.doomed and self._turned_away(key, output):
                return  # it came and went with one step; the refusal reaches nobody
            raise Broken("ended twice", f"{key} has ended, was cut or left, and gets {output}")
        line = self.lines[key]
        end = None
        for token in output.token_ids:
            wanted, end = line.expect()
            if token != wanted:
                raise Broken("answer", f"{key}: token {len(line.tokens)} is {token}, not {wanted}")
            line.take(token)
        if output.num_cached_tokens:
            self._check_hit(key, standing.asked, output.num_cached_tokens)
        if output.prompt_logprobs:
            self._check_scores(output, standing.asked)
        if len(output.logprobs) != (len(output.token_ids) if standing.asked.logprobs is not None else 0):
            raise Broken("answer", f"{key}: {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens")
        if output.finished is not None:
            self._check_end(key, output.finished, end)
            self._ended(key[1], standing)
        elif end is not None:
            raise Broken("answer", f"{key} goes on after its end {end}")

    def _turned_away(self, key: tuple[int, int], output: SequenceOutput) -> bool:
        refuses = self._watch.bound.refuses or self.refusal(self.standing[key[0]])
        return (
            bool(refuses)
            and output.finished is not None
            and output.finished.reason is FinishReason.ERROR
            and not self.lines[key].tokens
        )

    def _ended(self, index: int, standing: Standing) -> None:
        standing.open.discard(index)
        if not standing.open:
            self.there.discard(standing.number)
            self._watch.gone(standing.number)

    def _check_end(self, key: tuple[int, int], finished: Finished, end: oracle.End | None) -> None:
        found = (finished.reason, finished.message if finished.reason is FinishReason.ERROR else finished.stop_reason)
        self._seen[finished.reason.value] += 1
        self._seen["loops"] += finished.stop_reason == REPETITION
        self._seen["preemptions"] += finished.num_preemptions
        if finished.reason is FinishReason.ERROR:
            self._check_error(key, finished)
        elif found != end:
            raise Broken("answer", f"{key} ended with {found}, not {end}")
        elif self.standing[key[0]].asked.scored and key[1] == 0:
            hold(
                self._scored.get(key[0], 0) == len(self.standing[key[0]].asked.prompt) - 1,
                "scores",
                f"{key} ended, and not all of it was scored",
            )

    def _check_error(self, key: tuple[int, int], finished: Finished) -> None:
        """Only by a cause that is known: a step that failed and computed it, an unusable row, a grammar's dead end, a
        refusal."""
        refusal, message = self.refusal(self.standing[key[0]]), finished.message or ""
        plan, result = self._device.collected, self._device.result
        if message in (UNUSABLE, oracle.NOTHING_ALLOWED):
            hold(
                result is not None and message in result.errors.values(),
                "error",
                f"{key}: {message}, though the step has no such row",
            )
            hold(
                message == UNUSABLE or self.lines[key].expect()[1] == (FinishReason.ERROR, message),
                "error",
                f"{key}: {message}, wrongly",
            )
        elif refusal:
            hold(refusal in message, "error", f"{key}: {message!r} instead of a refusal that says {refusal!r}")
        elif plan is not None and result is None and key[0] in self._device.fallen:
            self._seen["fell with a step"] += 1
        else:
            turned_away = self._watch.bound.refuses and not self.lines[key].tokens
            hold(turned_away, "error", f"{key} ended with {message!r}, and nothing has failed")
            self._seen["turned away"] += 1

    def _check_hit(self, key: tuple[int, int], asked: Asked, count: int) -> None:
        self._seen["hits"] += 1
        allowed = self._setting.prefix_caching and self._setting.kv_caching and not asked.scored
        if not allowed or count >= len(asked.prompt) or not self._library.holds(asked, count):
            raise Broken("prefix", f"{key}: {count} tokens of {len(asked.prompt)} are said to be cached")

    def _check_scores(self, output: SequenceOutput, asked: Asked) -> None:
        """Each position of the prompt but the first, once and in order."""
        known = self._scored.get(output.request_id, 0)
        told = [entry.token_ids[0] for entry in output.prompt_logprobs]
        self._scored[output.request_id] = known + len(told)
        if not asked.scored or output.index or tuple(told) != asked.prompt[known + 1 : known + 1 + len(told)]:
            raise Broken("scores", f"request {output.request_id}: positions {known} to {known + len(told)} are {told}")
