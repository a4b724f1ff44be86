"""``headrace bench throughput`` and ``headrace bench latency``: the offline API, timed.

What lives here: both benchmarks, under the names and definitions known from ``vllm bench``. What may not: load curves
(serve.py, ablate.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from headrace.bench.steps import COLUMNS, steady_decode, summarise_steps
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig
from headrace.cost.profile import Limits
from headrace.observe.metrics import StepRecord
from headrace.observe.report import (
    machine_facts,
    print_facts,
    print_figures,
    shown_fraction,
    table,
    void_note,
    write_json,
)
from headrace.planner.workload.conversations import Conversation, conversations_of, random_conversations
from headrace.planner.workload.load import Lengths, drawn
from headrace.planner.workload.statistics import spread_of
from headrace.request import SamplingParams


def run_throughput(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace import LLM  # the engine, and torch with it

    facts, sweep = facts_here(config.device.device, shape=_throughput_shape(args)), Sweep()
    with LLM.from_config(config) as llm:
        llm.engine.await_kernels()
        _warm_up(llm, _fresh(args, llm.info.vocab_size, -1)[:4])
        runs = sweep.take(_timed(llm, _fresh(args, llm.info.vocab_size, repeat)) for repeat in range(args.repeats))
        records = llm.engine.recorder.records
        facts |= _engine_facts(llm)
    middle = sorted(runs, key=lambda run: run["elapsed_time"])[len(runs) // 2]
    spread = [run["output_tokens_per_second"] for run in runs]
    figures = {
        **middle,
        "output_tokens_per_second_lowest": min(spread),
        "output_tokens_per_second_highest": max(spread),
    }
    _show(args, facts, figures, records)
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    return sweep.status()


def _throughput_shape(args: argparse.Namespace) -> str:
    prefix = f" after a shared prefix of {args.prefix_len}" if args.prefix_len else ""
    return f"{args.num_prompts} requests, {args.input_len} in{prefix}, {args.output_len} out, range ratio {args.random_range_ratio:g}"


def _fresh(args: argparse.Namespace, vocab_size: int, repeat: int) -> list[Conversation]:
    """Other tokens in each repeat, so that none is answered from the previous one's cache."""
    lengths, seed = Lengths(args.input_len, args.output_len, args.random_range_ratio), repeat + 1
    asked = drawn(args.num_prompts, lengths, prefix=args.prefix_len, seed=seed)
    return conversations_of(asked, vocab_size=vocab_size, seed=seed)


def _timed(llm: Any, conversations: Sequence[Conversation]) -> dict[str, float]:
    prompts, params = _calls(conversations)
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


def _calls(conversations: Sequence[Conversation]) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    turns = [conversation.turns[0] for conversation in conversations]
    params = [SamplingParams(temperature=0.0, max_tokens=turn.max_tokens, ignore_eos=True) for turn in turns]
    return [{"prompt_token_ids": list(turn.new_ids)} for turn in turns], params


def _warm_up(llm: Any, conversations: Sequence[Conversation]) -> None:
    prompts, params = _calls(conversations)
    llm.generate(prompts, params, use_tqdm=False)


def run_latency(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace import LLM

    shape = f"batch {args.batch_size}, {args.input_len} in, {args.output_len} out, {args.num_iters} iterations"
    facts, sweep = facts_here(config.device.device, shape=shape), Sweep()
    with LLM.from_config(config) as llm:
        vocab, lengths = llm.info.vocab_size, Lengths(args.input_len, args.output_len)
        seeds = range(args.num_iters_warmup + args.num_iters)
        batches = [random_conversations(args.batch_size, lengths, vocab_size=vocab, seed=seed) for seed in seeds]
        llm.engine.await_kernels()
        for batch in batches[: args.num_iters_warmup]:
            _timed(llm, batch)
        taken = len(llm.engine.recorder.records)
        latencies = sweep.take(_timed(llm, batch)["elapsed_time"] for batch in batches[args.num_iters_warmup :])
        records = llm.engine.recorder.records
        records = records[taken:] if len(records) > taken else records  # the ring may have turned over
        facts |= _engine_facts(llm)
    figures = {
        "avg_latency": sum(latencies) / len(latencies),
        **spread_of(latencies, "latency", (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)),
    }
    figures["output_tokens_per_second"] = args.batch_size * args.output_len / (figures["median_latency_ms"] / 1e3)
    _show(args, facts, figures, records, latencies=latencies)
    return sweep.status()


def facts_here(device: str = "cpu", **more: Any) -> dict[str, Any]:
    """Machine, versions and the current limits, measured before the engine takes memory and bus. ``device`` as in the
    config."""
    return machine_facts(str(limits_here(device)), **more)


def limits_here(device: str) -> Limits:
    """Bandwidths and GEMM rates of the device that an engine with this config field would choose now."""
    from headrace.worker.profile import limits_now
    from headrace.worker.settings import device_kind

    return limits_now(device_kind(device))


def _engine_facts(llm: Any) -> dict[str, Any]:
    """The engine's own accounting, as it is included in every table."""
    info = llm.info
    return {
        "model": f"{info.model}, {info.dtype} on {info.device}",
        "choices": "; ".join(f"{each.name} {each.value}" for each in info.decisions),
    }


def _show(
    args: argparse.Namespace, facts: dict[str, Any], figures: dict[str, Any], records: Sequence[StepRecord], **more: Any
) -> None:
    steps, steady = summarise_steps(records), steady_decode(records)
    void = void_note({f"{step['steps']} steps": step["fraction"] for step in steps})
    print_facts(facts)
    print()
    print(table(COLUMNS, [list((step | {"fraction": shown_fraction(step["fraction"])}).values()) for step in steps]))
    if void is not None:
        print(void)
    if steady is not None:
        print(steady)
        figures |= steady.as_dict()
    print()
    print_figures(figures)
    if args.output_json:
        write_json(args.output_json, {"facts": facts, **figures, "steps": steps, "void": void, **more})
