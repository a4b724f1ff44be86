"""``python -m lab rival``: the same shape on llama.cpp, both sides in turn in one run.

Random bfloat16 weights in a model's shape: Headrace makes its own (``--load-format dummy``), llama.cpp reads a GGUF
written for it. With ``--format`` both read the same GGUF in blocks. Single-stream decoding, one prompt's prefill, and a
batch that only Headrace runs (its gain over its own single stream).

What lives here: the comparison. What may not: the rival's process (rival_llama_cpp.py), its file (rival_gguf.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.arguments import count, output, positive
from headrace.bench.offline import facts_here
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.models.families import spec_from_config
from headrace.models.source import find_model
from headrace.observe.report import print_facts, table, write_json
from headrace.request import RequestOutput, SamplingParams
from lab import rival_llama_cpp
from lab.rival_gguf import FORMATS, write_random_gguf

_BATCH_PROMPT = 64  # tokens: the batch is there for its decoding
_TOLERANCE = 0.10  # how far the rival may be from what is expected of it on this class of machine


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second, one entry a repeat."""

    prefill: list[float]
    decode: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rival-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that has llama-cpp-python (default: this one)",
    )
    parser.add_argument("--format", choices=FORMATS, default="BF16", help="of the weights (default: BF16)")
    parser.add_argument("--input-len", type=count, default=512, help="prompt tokens (default: 512)")
    parser.add_argument("--output-len", type=count, default=64, help="decoded tokens (default: 64)")
    parser.add_argument(
        "--batch-size", type=count, default=16, help="Headrace's batch beside its single stream (default: 16)"
    )
    parser.add_argument("--rounds", type=count, default=5, help="turns of each side (default: 5)")
    parser.add_argument(
        "--rival-threads",
        default="1:1,2:2",
        metavar="D:P,…",
        help="its decode:prefill threads to try (default: 1:1,2:2)",
    )
    parser.add_argument(
        "--expect-decode",
        type=positive,
        help="tokens/s the rival is known to reach; more than 10 %% off voids the comparison",
    )
    parser.add_argument("--expect-prefill", type=positive, help="likewise for prefill")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace.engine.llm import LLM  # the engine, and torch with it

    model = replace(
        config.model, load_format="dummy", dtype="bfloat16", max_model_len=args.input_len + args.output_len + 16
    )
    spec = spec_from_config(find_model(model).config)
    named = Path(config.model.model).name if config.model.model else "the bundled model"
    facts = facts_here(
        shape=f"{named}, {args.format}: {args.input_len} in, {args.output_len} out, {args.rounds} rounds in turn"
    )
    with tempfile.TemporaryDirectory(prefix="headrace-rival-") as folder:
        gguf = Path(folder) / "random.gguf"
        write_random_gguf(gguf, spec, args.input_len + args.output_len + 16, args.format)
        model = model if args.format == "BF16" else replace(model, model=str(gguf), load_format="auto")
        threads = _best_threads(args, gguf)
        with LLM.from_config(replace(config, model=model)) as llm:
            _ours(llm, args, 1, args.input_len, seed=1)  # warm

            def measured(number: int) -> tuple[Rates, Rates, Rates]:
                theirs, ours = _theirs(args, gguf, threads), _ours(llm, args, 1, args.input_len, seed=10 + number)
                return ours, theirs, _ours(llm, args, args.batch_size, _BATCH_PROMPT, seed=100 + number)

            sweep = Sweep()
            rounds = sweep.take(
                map(measured, range(args.rounds))
            )  # what the machine loses to its neighbours, both sides lose
    facts["rival"] = f"llama.cpp with {threads[0]} decode and {threads[1]} prefill threads"
    _show(args, facts, *(_merge(side) for side in zip(*rounds, strict=True)))
    return sweep.status()


def _merge(rounds: Sequence[Rates]) -> Rates:
    return Rates([rate for each in rounds for rate in each.prefill], [rate for each in rounds for rate in each.decode])


def _best_threads(args: argparse.Namespace, gguf: Path) -> tuple[int, int]:
    """The rival's best setting for each of its two figures."""
    pairs = [tuple(map(int, pair.split(":"))) for pair in args.rival_threads.split(",")]
    tried = {pair: _theirs(args, gguf, pair) for pair in pairs}
    return max(tried, key=lambda pair: tried[pair].decode[0])[0], max(tried, key=lambda pair: tried[pair].prefill[0])[1]


def _theirs(args: argparse.Namespace, gguf: Path, threads: Sequence[int]) -> Rates:
    command = [
        args.rival_python,
        str(Path(rival_llama_cpp.__file__)),
        str(gguf),
        *map(str, (args.input_len, args.output_len, *threads)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"llama.cpp could not be run ({reason}); install llama-cpp-python and name its interpreter with --rival-python."
        )
    return Rates(**json.loads(done.stdout.splitlines()[-1]))


def _ours(llm: Any, args: argparse.Namespace, batch: int, input_len: int, seed: int) -> Rates:
    """Prefill: prompt tokens until the first answer token. Decode: all tokens after each one's first, over the time
    they took."""
    import random

    draw = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [draw.randrange(llm.info.vocab_size) for _ in range(input_len)]} for _ in range(batch)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len + 1, ignore_eos=True, detokenize=False)
    outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
    times = [output.metrics for output in outputs if output.metrics]
    first = max(t.first_token for t in times if t.first_token is not None)
    begin = min(t.first_scheduled for t in times if t.first_scheduled is not None)
    last = max(t.finished for t in times if t.finished is not None)
    # in a batch, decoding begins while later prompts are computed: only the part after the last first token is pure
    # decode
    decoded = batch * args.output_len if batch == 1 else sum(_tokens_after(t, first, args.output_len) for t in times)
    return Rates([batch * input_len / (first - begin)], [decoded / (last - first)])


def _tokens_after(times: Any, moment: float, output: int) -> float:
    """How many of a request's tokens came after ``moment``, its own being spread evenly from first to last."""
    return float(output * (times.finished - moment) / (times.finished - times.first_token))


def _show(args: argparse.Namespace, facts: dict[str, Any], ours: Rates, theirs: Rates, batch: Rates) -> None:
    rows = [
        _row("decode, 1 stream", ours.decode, theirs.decode),
        _row(f"prefill, {args.input_len}", ours.prefill, theirs.prefill),
        _row(f"decode, batch {args.batch_size} (to its own 1 stream)", batch.decode, ours.decode),
    ]
    print_facts(facts)
    print()
    print(table(["tokens/s", "headrace", "rival", "ratio", "ratios of rounds"], rows))
    print(f"\n{_verdict(args, theirs)}")
    if args.output_json:
        write_json(
            args.output_json,
            {"facts": facts, "headrace": asdict(ours), "llama.cpp": asdict(theirs), "batch": asdict(batch)},
        )


def _row(name: str, ours: Sequence[float], theirs: Sequence[float]) -> list[Any]:
    """The ratio is the median of the rounds' own ratios: a machine that slows down for a while slows both sides of a
    round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [name, median(ours), median(theirs), median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"]


def _verdict(args: argparse.Namespace, theirs: Rates) -> str:
    """Whether the rival ran as well as it is known to; a slow rival proves nothing."""
    for name, expected, found in (
        ("decode", args.expect_decode, median(theirs.decode)),
        ("prefill", args.expect_prefill, median(theirs.prefill)),
    ):
        if expected is not None and abs(found / expected - 1) > _TOLERANCE:
            return f"VOID: llama.cpp's {name} is {found:.1f} tokens/s, not {expected:.1f}; the machine is not quiet or not of that class."
    return "The rival is within 10 % of what is expected of it." if args.expect_decode or args.expect_prefill else ""
