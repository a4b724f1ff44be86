"""``headrace generate``: prompts from a JSONL file, answers into another.

What lives here: lines to requests, outputs to lines. What may not: sampling, batching (the engine's), terminals beyond
a progress line.

An input line is an object with one of "prompt", "prompt_token_ids" and "messages", and optionally "id", "tools",
"chat_template_kwargs", "cache_salt", "priority" and any sampling field. A line that cannot be served becomes an error
line in the output; the others run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from headrace.bench.arguments import declare
from headrace.commands.sampling_flags import (
    PARAM_NAMES,
    add_sampling_flags,
    over_defaults,
    sampling_values,
    with_values,
)
from headrace.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError, InvalidRequest
from headrace.flags import add_config_flags, add_model_argument, engine_config
from headrace.observe.progress import ProgressLine
from headrace.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from headrace.engine.llm import LLM
    from headrace.engine.output import OutputCollector

_SOURCES = ("prompt", "prompt_token_ids", "messages")
_PROMPT_FIELDS = frozenset({*_SOURCES, "tools", "chat_template_kwargs", "cache_salt", "priority"})
_PER_ROW = 4  # lines under way for each row of the engine: enough to keep it full, not the whole file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    declare(parser, "generate.arguments")
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if at least one line could not be served."""
    if (args.input is None) == (args.prompt is None):
        raise ConfigError("give either --input FILE or --prompt TEXT.")
    config, flags = engine_config(args), sampling_values(args)
    with contextlib.ExitStack() as stack:
        if args.prompt is not None:
            lines: Iterator[str] = (json.dumps({"prompt": prompt}) for prompt in args.prompt)
            total = len(args.prompt)
        else:
            lines, total = _open_input(args.input, stack)
        out = _open_output(args.output, args.input, stack)
        from headrace import LLM  # torch

        llm = stack.enter_context(LLM.from_config(config, texts=args.prompt is not None))
        params = over_defaults(llm.get_default_sampling_params(), flags)
        plain = args.prompt is not None and args.output == "-"
        batch = _Batch(llm, params, total, clamp="max_tokens" not in vars(args))
        failed = batch.run(
            lines, lambda done: out.write((_plain(done) if plain else json.dumps(done, ensure_ascii=False)) + "\n")
        )
    if failed:
        print(f"headrace: {failed} of the lines could not be served; their errors are in the output.", file=sys.stderr)
    return 1 if failed else 0


@dataclass(slots=True)
class _Job:
    """One line in progress. ``failure``: the error object, if it never ran."""

    number: int
    given_id: Any
    collector: OutputCollector | None = None
    failure: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        return self.failure is not None or (self.collector is not None and self.collector.finished)


class _Batch:
    """A window of lines that moves over the input: memory does not grow with the file, and the engine stays full."""

    def __init__(self, llm: LLM, params: SamplingParams, total: int, *, clamp: bool) -> None:
        self._llm = llm
        self._params = params
        self._clamp = clamp
        self._jobs: deque[_Job] = deque()
        self._bar = ProgressLine(total, "Generating")
        self._failed = 0

    def run(self, lines: Iterator[str], write: Callable[[dict[str, Any]], Any]) -> int:
        """Writes one result per line, in order; returns how many failed."""
        window = _PER_ROW * self._llm.info.max_num_seqs
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    self._jobs.append(self._begin(number, line))
                while len(self._jobs) >= window:
                    self._advance(write)
            while self._jobs:
                self._advance(write)
        finally:
            self._bar.close()
        return self._failed

    def _advance(self, write: Callable[[dict[str, Any]], Any]) -> None:
        if not self._jobs[0].done:
            self._llm.turn()
        while self._jobs and self._jobs[0].done:
            job = self._jobs.popleft()
            result = _result(job)
            self._failed += "error" in result
            write(result)
            self._bar.add_tokens(result.get("usage", {}).get("completion_tokens", 0))
            self._bar.update(1)

    def _begin(self, number: int, line: str) -> _Job:
        job = _Job(number, None)
        try:
            fields = _fields(line)
            job.given_id = fields.pop("id", None)
            job.collector = self._submit(fields)
        except InvalidRequest as error:
            job.failure = _error(error)
        return job

    def _submit(self, fields: dict[str, Any]) -> OutputCollector:
        source = [name for name in _SOURCES if name in fields]
        if len(source) != 1:
            raise InvalidRequest(
                f"a line needs exactly one of {', '.join(_SOURCES)}, but it has {' and '.join(source) or 'none'}.",
                param="prompt",
            )
        asked = {name: value for name, value in fields.items() if name not in _PROMPT_FIELDS}
        params = with_values(self._params, asked)
        clamp = self._clamp and "max_tokens" not in asked
        options: dict[str, Any] = {name: fields[name] for name in ("cache_salt", "priority") if name in fields}
        if source[0] != "messages":
            return self._llm.submit({source[0]: fields[source[0]], **options}, params, clamp=clamp)
        options |= {"tools": fields.get("tools"), **_mapping(fields, "chat_template_kwargs")}
        return self._llm.submit_chat(_messages(fields["messages"]), params, clamp=clamp, **options)


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}. Write one JSON object per line.") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"a JSON {type(fields).__name__} and not an object; write one JSON object per line.")
    unknown = sorted(set(fields) - PARAM_NAMES - _PROMPT_FIELDS - {"id"})
    if unknown:
        raise InvalidRequest(f"unknown fields {', '.join(unknown)}; correct or remove them.", param=unknown[0])
    return fields


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or any(not isinstance(each, dict) for each in value):
        raise InvalidRequest(
            'messages must be a list of objects with "role" and "content"; give at least one.', param="messages"
        )
    return value


def _mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object; give one.", param=name)
    return value


def _result(job: _Job) -> dict[str, Any]:
    head = {"line": job.number, **({"id": job.given_id} if job.given_id is not None else {})}
    if job.failure is not None or job.collector is None:
        return {**head, "error": job.failure}
    output = job.collector.output()
    broken = next((each for each in output.outputs if each.finish_reason == "error"), None)
    if broken is not None:
        return {**head, "error": _error(HeadraceError(str(broken.stop_reason)))}
    return {
        **head,
        "outputs": [_completion(each) for each in output.outputs],
        "usage": _usage(output),
        **_prompt_scores(output),
    }


def _completion(each: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": each.text,
        "token_ids": each.token_ids,
        "finish_reason": each.finish_reason,
        "stop_reason": each.stop_reason,
    }
    if each.logprobs is not None:
        found["logprobs"] = [_scores(position) for position in each.logprobs]
        found["cumulative_logprob"] = _finite(each.cumulative_logprob)
    return found


def _prompt_scores(output: RequestOutput) -> dict[str, Any]:
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [None if position is None else _scores(position) for position in output.prompt_logprobs]}


def _scores(position: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "token": s.decoded_token, "logprob": _finite(s.logprob), "rank": s.rank}
        for token, s in position.items()
    ]


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: None for the logprob of a token that cannot occur."""
    return value if value is not None and math.isfinite(value) else None


def _usage(output: RequestOutput) -> dict[str, int]:
    completion = sum(len(each.token_ids) for each in output.outputs)
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": completion,
        "cached_tokens": output.num_cached_tokens,
    }


def _error(error: HeadraceError) -> dict[str, Any]:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def _plain(result: dict[str, Any]) -> str:
    return f"error: {result['error']['message']}" if "error" in result else str(result["outputs"][0]["text"])


def _open_input(name: str, stack: contextlib.ExitStack) -> tuple[Iterator[str], int]:
    """The lines, and how many there are (0: unknown)."""
    if name == "-":
        return iter(io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace")), 0
    try:
        file = stack.enter_context(open(name, encoding="utf-8", errors="replace"))  # noqa: SIM115  (the stack closes it)
        total = sum(1 for line in file if line.strip())
        file.seek(0)
    except OSError as error:
        raise ConfigError(f"--input {name}: {error.strerror}; check the path.") from error
    return iter(file), total


def _open_output(name: str, source: str | None, stack: contextlib.ExitStack) -> TextIO:
    if name == "-":
        return sys.stdout
    if source not in (None, "-") and Path(name).exists() and Path(name).samefile(str(source)):
        raise ConfigError(f"--output {name} is the input itself; name another file.")
    try:
        return stack.enter_context(Path(name).open("w", encoding="utf-8", buffering=1))
    except OSError as error:
        raise ConfigError(f"--output {name}: {error.strerror}; check the path.") from error
