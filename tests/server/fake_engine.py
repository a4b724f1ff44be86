"""A server over an engine that is a script: what the real one does only when it is slow, broken or killed happens on
request.

Run as a program it serves like ``headrace serve``. A request's seed picks its behaviour (the names below); any other
seed, or none, streams ``max_tokens`` tokens ("tok0 tok1 …", or the prompt's own ids with temperature 0), one every
--token-seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from headrace.config import EngineConfig, ModelConfig, ServerConfig
from headrace.engine import connection as engine
from headrace.engine.info import EngineInfo
from headrace.engine.inputs import InputProcessor, ParsedPrompt
from headrace.engine.output import RequestDelta, refusal_of
from headrace.engine.tokenizer import load_tokenizer
from headrace.errors import EngineDead
from headrace.models.source import find_model
from headrace.observe.metrics import StepRecorder
from headrace.request import Finished, FinishReason, Request, SamplingParams, TokenLogprobs
from headrace.server import connection, exchange, lifecycle
from headrace.server.run import run_server

SILENT = 1001  # nothing for SILENT_SECONDS, then an answer
DIES = 1002  # two tokens, then the engine is dead
STEP_FAILS = 1003  # two tokens, then this request's step failed
DEFECT = 1004  # a defect of ours: an exception nobody expected
ENDLESS = 1005  # large deltas as fast as they are taken
SEPARATORS = 1006  # text with what some clients take for line ends
FAST = 1007  # no waiting between tokens
HANGS = 1008  # two tokens, then the engine makes no progress but is not dead
STALLS = 1009  # so for a while, then it goes on
SCRIPTED = 1010  # says what stands between ⟦ and ⟧ in the prompt, three characters a token, and stops

# the same in the model's own tokens; what stands in the last brackets, where the prompt's end has closed some reasoning
SPOKEN = 1013
TURNED_AWAY = 1011  # refused before the first token: it would come too late
NEVER = 1012  # likewise: it asks for what cannot be

Deltas = AsyncIterator[Sequence[RequestDelta]]

SILENT_SECONDS = 1.2


class FakeStream:
    """An engine's stream: one of its answers can be left, and none of its deltas comes any more."""

    def __init__(self, deltas: AsyncGenerator[Sequence[RequestDelta], None]) -> None:
        self._deltas = deltas
        self._left: set[int] = set()

    async def __aiter__(self) -> Deltas:
        async for batch in self._deltas:
            yield [delta for delta in batch if delta.index not in self._left]

    async def aclose(self) -> None:
        await self._deltas.aclose()

    def end_answer(self, index: int) -> None:
        self._left.add(index)


class FakeEngine:
    def __init__(self, max_model_len: int, token_seconds: float) -> None:
        self._token_seconds = token_seconds
        self.source = find_model(ModelConfig())
        self.tokenizer = load_tokenizer(self.source)
        assert self.tokenizer is not None
        self.info = EngineInfo(
            model="demo", served_names=("demo", "org/alias"), max_model_len=max_model_len, max_sequence_tokens=max_model_len,
            vocab_size=self.tokenizer.vocab_size, max_num_seqs=64, eos_token_ids=(), device="none", dtype="none",
        )  # fmt: skip
        self.inputs = InputProcessor(self.info, self.tokenizer, 0)
        self.generation_defaults: Mapping[str, Any] = {}
        self.alive, self.dead = True, False
        self.live = 0
        self.asleep, self.adapter_names = False, ()

    @property
    def ailment(self) -> str | None:
        return None if self.alive else "it was told to"

    async def wake_up(self) -> None: ...

    def submit(self, request: Request, *, whole: bool = False) -> FakeStream:
        return FakeStream(self._stream(ParsedPrompt(None, request.prompt_token_ids), request.params))

    async def _stream(
        self, prompt: ParsedPrompt, params: SamplingParams
    ) -> AsyncGenerator[Sequence[RequestDelta], None]:
        self.live += 1
        try:
            if params.seed == SILENT:
                await asyncio.sleep(SILENT_SECONDS)
            if params.seed == DEFECT:
                raise KeyError("planted")
            if params.seed == SPOKEN or (params.seed or 0) >= 1 << 32:  # or made from it
                for deltas in self._spoken(prompt, params):
                    yield deltas
                    if deltas[-1].last:
                        return
            if params.seed == SCRIPTED:
                for deltas in self._scripted(prompt, params):
                    yield deltas
                return
            for position in range(params.max_tokens or 1):
                await asyncio.sleep(0 if params.seed in (ENDLESS, FAST) else self._token_seconds)
                self._misbehave(params.seed, position)
                if params.seed == STALLS and position == 2:
                    await self._stall()
                yield [self._delta(index, position, prompt, params) for index in range(params.n)]
        finally:
            self.live -= 1

    def _scripted(self, prompt: ParsedPrompt, params: SamplingParams) -> Iterator[list[RequestDelta]]:
        assert self.tokenizer is not None and prompt.token_ids is not None
        text = self.tokenizer.decode(prompt.token_ids, False).rpartition("⟦")[2].partition("⟧")[0]
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
        for position, piece in enumerate(pieces[: params.max_tokens]):
            yield [RequestDelta(index, piece, (position,)) for index in range(params.n)]
        reason = "stop" if len(pieces) <= (params.max_tokens or 0) else "length"
        yield [
            RequestDelta(index, "", (), finish_reason=reason, last=index == params.n - 1) for index in range(params.n)
        ]

    def _spoken(self, prompt: ParsedPrompt, params: SamplingParams) -> Iterator[list[RequestDelta]]:
        assert self.tokenizer is not None and prompt.token_ids is not None
        before = self.tokenizer.decode(prompt.token_ids, False)
        scripts = re.findall("⟦(.*?)⟧", before, re.S)
        if not scripts:
            return
        ids = self.tokenizer.encode(scripts[-1] if before.rstrip().endswith("</think>") else scripts[0], False)
        decoder = self.tokenizer.stream_decoder(params.skip_special_tokens)
        for token in ids[: params.max_tokens]:
            text = decoder.push([token])
            scores = (TokenLogprobs((token,), (-0.5,), 1),) if params.logprobs is not None else ()
            yield [
                RequestDelta(index, text, (token,), logprobs=scores, num_cached_tokens=7) for index in range(params.n)
            ]
        reason = "stop" if len(ids) <= (params.max_tokens or 0) else "length"
        yield [
            RequestDelta(index, decoder.flush(), (), finish_reason=reason, last=index == params.n - 1)
            for index in range(params.n)
        ]

    def _misbehave(self, seed: int | None, position: int) -> None:
        if position == 2 and seed == DIES:
            self.alive, self.dead = False, True
            raise EngineDead("the engine was killed")
        if position == 2 and seed == HANGS:
            self.alive = False

    async def _stall(self) -> None:
        self.alive = False
        for _ in range(5):  # not one sleep: a process that was stopped in between has slept it out when it goes on
            await asyncio.sleep(0.1)
        self.alive = True

    def _delta(self, index: int, position: int, prompt: ParsedPrompt, params: SamplingParams) -> RequestDelta:
        assert self.tokenizer is not None and prompt.token_ids is not None
        token = prompt.token_ids[position % len(prompt.token_ids)]
        text = {ENDLESS: "x" * 4096, SEPARATORS: "a\u2028b\u2029c\u0085d\U0001f600é"}.get(
            params.seed or 0, f"tok{position} "
        )
        if params.seed in (TURNED_AWAY, NEVER):
            asked = {"retry_after": 6.2} if params.seed == TURNED_AWAY else {"param": "expected_ttft"}
            finished = Finished(FinishReason.ERROR, message="It would come after 8.2 s.", **asked)
            return RequestDelta(
                index, "", (), finish_reason="error", error=finished.message, refusal=refusal_of(finished), last=True
            )
        delta = RequestDelta(index, text, (token,))
        if params.logprobs is not None:
            best = tuple(range(params.logprobs))
            delta.logprobs = (TokenLogprobs((token, *best), (-0.5, *(float("-inf") if i else -0.25 for i in best)), 2),)
        if position == 0:
            delta.num_cached_tokens = 1
        if position == 2 and params.seed == STEP_FAILS:
            delta.finish_reason, delta.error = "error", "the logits of this row were not finite; send it again"
        elif position + 1 == params.max_tokens:
            delta.finish_reason = "length"
            delta.last = index == params.n - 1
        return delta

    async def stats(self) -> Mapping[str, Any]:
        return {
            "num_running": self.live,
            "num_waiting": 0,
            "num_blocks": 100,
            "num_used_blocks": self.live,
            "counters": {},
        }

    async def recent(self, step: int, decision: int) -> Mapping[str, Any]:
        more = {"num_cached_blocks": 0, "num_prefilling": 0, "num_preempted": 0, "records": [], "decisions": []}
        counters = {"prefix_queries": 0, "prefix_hits": 0, "preemptions": 0}
        return {**await self.stats(), **more, "counters": counters, "steps": StepRecorder().summary()}

    async def explain(self, streams: Sequence[Any]) -> Mapping[str, Any]:
        return {"requests": [None] * len(streams), "accounts": [None] * len(streams)}

    async def reset_prefix_cache(self) -> None:
        pass

    async def shutdown(self, timeout: float = 0.0, *, kill_after: float = 5.0) -> None:
        self.alive = False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--max-body-bytes", type=int, default=1 << 20)
    parser.add_argument("--shutdown-timeout", type=float, default=5.0)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--token-seconds", type=float, default=0.01)
    parser.add_argument("--ping-seconds", type=float, default=0.3)
    parser.add_argument("--laggard-seconds", type=float, default=2.0)
    parser.add_argument("--reasoning-parser", default="auto")
    parser.add_argument("--max-connections", type=int, default=1024)
    parser.add_argument("--unread-seconds", type=float, default=3.0)
    args = parser.parse_args()
    exchange.PING_SECONDS, exchange.PULSE_SECONDS, exchange.LAGGARD_SECONDS = (
        args.ping_seconds,
        0.1,
        args.laggard_seconds,
    )
    connection.HEADER_SECONDS, connection.UNREAD_SECONDS, connection.MAX_CONNECTIONS = (
        1.0,
        args.unread_seconds,
        args.max_connections,
    )
    lifecycle.LAST_WORDS_SECONDS, engine.GONE_SECONDS, connection.FULL_SECONDS = 0.5, 0.8, 0.2

    async def create() -> FakeEngine:
        await asyncio.sleep(args.load_seconds)
        return FakeEngine(args.max_model_len, args.token_seconds)

    names = ("max_queue", "max_body_bytes", "shutdown_timeout", "reasoning_parser")
    config = ServerConfig(port=0, api_key=tuple(args.api_key), **{name: getattr(args, name) for name in names})
    return run_server(EngineConfig(), config, "0", create)


if __name__ == "__main__":
    sys.exit(main())
