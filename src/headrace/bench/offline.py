"""``headrace bench throughput`` and ``headrace bench latency``: the offline API, timed.

What lives here: both benchmarks, under the names and definitions people know from ``vllm bench``. What may not: load curves
(serve.py, ablate.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrace.bench.arguments import natural, output, share
from headrace.bench.report import (
    COMPRESSION,
    MOST_FRACTION,
    machine_facts,
    print_facts,
    print_figures,
    shown_fraction,
    table,
    void_note,
    write_json,
)
from headrace.bench.skip import check_skip_profile, run_skip_profile, show_skip, skip_as_dicts
from headrace.bench.statistics import spread_of
from headrace.bench.steps import COLUMNS, calibrate, describe_calibration, steady_decode, summarise_steps
from headrace.bench.sweep import Sweep
from headrace.bench.workload import Dialogue, Lengths, random_dialogues, shared_prefix_dialogues
from headrace.config import EngineConfig
from headrace.cost.profile import Limits
from headrace.errors import ConfigError
from headrace.metrics import StepRecord
from headrace.sampling_params import SamplingParams


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=32, help="requests, all given at once (default: 32)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (default: 128)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens (default: 128)")
    parser.add_argument("--random-range-ratio", type=share, default=0.0, help="lengths are drawn from length * (1 ± RATIO) (default: 0)")
    parser.add_argument("--prefix-len", type=natural, default=0, help="tokens every prompt begins with, besides --input-len (default: 0)")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats (default: 3)")
    _add_output(parser)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=1, help="requests at once (default: 1)")
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens (default: 32)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens (default: 128)")
    parser.add_argument("--num-iters-warmup", type=natural, default=2, help="batches before timing (default: 2)")
    parser.add_argument("--num-iters", type=int, default=5, help="timed batches (default: 5)")
    parser.add_argument("--skip-profile", action="store_true", help="then look at kernel launches (TKLQT): CPU-bound or GPU-bound (CUDA)")
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run_throughput(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace.engine.llm import LLM  # the engine, and torch with it

    _check_positive(args, "num_prompts", "input_len", "output_len", "repeats")
    facts, sweep = facts_here(config.device.device, shape=_throughput_shape(args)), Sweep()
    with LLM.from_config(config) as llm:
        llm.engine.await_kernels()
        _warm_up(llm, _fresh(args, llm.info.vocab_size, -1)[:4])
        runs = sweep.take(_timed(llm, _fresh(args, llm.info.vocab_size, repeat)) for repeat in range(args.repeats))
        records = llm.engine.recorder.records
        facts |= _engine_facts(llm)
    middle = sorted(runs, key=lambda run: run["elapsed_time"])[len(runs) // 2]
    spread = [run["output_tokens_per_second"] for run in runs]
    figures = {**middle, "output_tokens_per_second_lowest": min(spread), "output_tokens_per_second_highest": max(spread)}
    _show(args, facts, figures, records, compressed=config.device.compressed_weights)
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    return sweep.status()


def _throughput_shape(args: argparse.Namespace) -> str:
    prefix = f" after a shared prefix of {args.prefix_len}" if args.prefix_len else ""
    return f"{args.num_prompts} requests, {args.input_len} in{prefix}, {args.output_len} out, range ratio {args.random_range_ratio:g}"


def _throughput_workload(args: argparse.Namespace, vocab_size: int, seed: int = 0) -> list[Dialogue]:
    lengths = Lengths(args.input_len, args.output_len, args.random_range_ratio)
    if args.prefix_len:
        return shared_prefix_dialogues(args.num_prompts, lengths, num_prefixes=1, prefix_len=args.prefix_len, vocab_size=vocab_size, seed=seed)
    return random_dialogues(args.num_prompts, lengths, vocab_size=vocab_size, seed=seed)


def _fresh(args: argparse.Namespace, vocab_size: int, repeat: int) -> list[Dialogue]:
    """Other tokens in each repeat, so that none is answered from the last one's cache."""
    return _throughput_workload(args, vocab_size, seed=repeat + 1)


def _timed(llm: Any, dialogues: Sequence[Dialogue]) -> dict[str, float]:
    prompts, params = _calls(dialogues)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - begin
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    total = generated + sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": generated / elapsed,
    }


def _calls(dialogues: Sequence[Dialogue]) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    turns = [dialogue.turns[0] for dialogue in dialogues]
    params = [SamplingParams(temperature=0.0, max_tokens=turn.max_tokens, ignore_eos=True) for turn in turns]
    return [{"prompt_token_ids": list(turn.new_ids)} for turn in turns], params


def _warm_up(llm: Any, dialogues: Sequence[Dialogue]) -> None:
    prompts, params = _calls(dialogues)
    llm.generate(prompts, params, use_tqdm=False)


def run_latency(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace.engine.llm import LLM

    _check_positive(args, "batch_size", "input_len", "output_len", "num_iters")
    if args.skip_profile:
        check_skip_profile(config)
    shape = f"batch {args.batch_size}, {args.input_len} in, {args.output_len} out, {args.num_iters} iterations"
    facts, sweep = facts_here(config.device.device, shape=shape), Sweep()
    with LLM.from_config(config) as llm:
        vocab, lengths = llm.info.vocab_size, Lengths(args.input_len, args.output_len)
        batches = [random_dialogues(args.batch_size, lengths, vocab_size=vocab, seed=seed) for seed in range(args.num_iters_warmup + args.num_iters)]
        llm.engine.await_kernels()
        for batch in batches[: args.num_iters_warmup]:
            _timed(llm, batch)
        taken = len(llm.engine.recorder.records)
        latencies = sweep.take(_timed(llm, batch)["elapsed_time"] for batch in batches[args.num_iters_warmup :])
        records = llm.engine.recorder.records
        records = records[taken:] if len(records) > taken else records  # the ring may have turned over
        facts |= _engine_facts(llm)
    figures = {"avg_latency": sum(latencies) / len(latencies), **spread_of(latencies, "latency", (10.0, 25.0, 50.0, 75.0, 90.0, 99.0))}
    figures["output_tokens_per_second"] = args.batch_size * args.output_len / (figures["median_latency_ms"] / 1e3)
    launches = run_skip_profile(config, args.batch_size, args.input_len) if args.skip_profile and not sweep.stopped else []
    compressed = config.device.compressed_weights
    _show(args, facts, figures, records, compressed=compressed, latencies=latencies, launches=skip_as_dicts(launches))
    if launches:
        print("\n" + show_skip(launches))
    return sweep.status()


def facts_here(device: str = "cpu", **more: Any) -> dict[str, Any]:
    """Machine, versions and the limits of this moment: measured before the engine takes memory and bus. ``device`` as in the config."""
    return machine_facts(str(limits_here(device)), **more)


def limits_here(device: str) -> Limits:
    """Bandwidths and GEMM rates of the device an engine with this config field would choose now."""
    from headrace.worker.profile import limits_now
    from headrace.worker.settings import device_kind

    return limits_now(device_kind(device))


def _engine_facts(llm: Any) -> dict[str, Any]:
    """The engine's own account, as it goes into every table."""
    info = llm.info
    return {"model": f"{info.model}, {info.dtype} on {info.device}", "choices": "; ".join(f"{each.name} {each.value}" for each in info.decisions)}


def _show(
    args: argparse.Namespace, facts: dict[str, Any], figures: dict[str, Any], records: Sequence[StepRecord], *, compressed: bool, **more: Any
) -> None:
    """``compressed``: weights are, which floors do not know."""
    steps, calibration, steady = summarise_steps(records), calibrate(records), steady_decode(records)
    most = MOST_FRACTION * (COMPRESSION if compressed else 1.0)
    void = void_note({f"{step['steps']} steps": step["fraction"] for step in steps}, most)
    print_facts(facts)
    print()
    print(table(COLUMNS, [list((step | {"fraction": shown_fraction(step["fraction"], most)}).values()) for step in steps]))
    print(void or describe_calibration(calibration, most))
    if steady is not None:
        print(steady)
        figures |= steady.as_dict()
    print()
    print_figures(figures)
    if args.output_json:
        fitted = asdict(calibration) if calibration is not None else None
        write_json(args.output_json, {"facts": facts, **figures, "steps": steps, "calibration": fitted, "void": void, **more})


def _check_positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1.")
