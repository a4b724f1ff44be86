"""``python -m lab share``: how long processes with one copy of the weights take to be ready, what each
adds to the device's memory, and what they say once the first of them has gone.

What lives here: these processes, their times and memory. What may not: sharing (worker/shared_device.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these processes are timed: they import what an engine does
    from headrace.config import EngineConfig

GIB, MIB = 2**30, 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from headrace.bench.arguments import count

    parser.add_argument(
        "--model", default="Llama-3.1-8B", help="a folder, or a shape of lab/shapes (default: %(default)s)"
    )
    parser.add_argument("--processes", type=count, default=3, help="one after another (default: 3)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the engine, behind --")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace.bench.startup import bytecode
    from lab.jobs import config_for, flags_of

    flags = ["--share-weights", *flags_of(config_for(args.model, config), args.flags)]
    with bytecode() as installed:
        _measure(args, partial(_start, flags, installed))
    return 0


def _measure(args: argparse.Namespace, start: Callable[[], subprocess.Popen[str]]) -> None:
    before, children = _used(), list[subprocess.Popen[str]]()
    try:
        for number in range(1, args.processes + 1):
            begin = time.perf_counter()
            children.append(start())
            said = _heard(children[-1])
            seconds, used = time.perf_counter() - begin, _used()
            stages = ", ".join(f"{name} {each:.2f}" for name, each in said["stages"].items())
            print(
                f"process {number}: ready after {seconds:.2f} s, {(used - before) / GIB:.2f} GiB more; {said['weights']}"
            )
            parts = ", ".join(f"{name} {each / MIB:.0f}" for name, each in said["memory"].items())
            print(f"  {stages}; {' '.join(map(str, said['answer']))}\n  MiB: {parts}")
            before = used
        first = children.pop(0)
        first.communicate("end\n")  # as one that is told to
        print(f"without the first: {(_used() - before) / GIB:+.2f} GiB")
        print(
            "the same answers" if len({_again(each) for each in children} | {tuple(said["answer"])}) == 1 else "OTHERS"
        )
        for each in children:
            each.communicate("end\n")
    finally:
        for each in children:
            each.kill()
            each.wait()
    print(f"without any: {(_used() - before) / GIB:+.2f} GiB")


def _start(flags: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "lab.share", *flags], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _heard(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    found: dict[str, Any] = json.loads(child.stdout.readline())
    return found


def _again(child: subprocess.Popen[str]) -> tuple[int, ...]:
    assert child.stdin is not None
    child.stdin.write("again\n")
    child.stdin.flush()
    return tuple(_heard(child)["answer"])


def _used() -> int:
    """Bytes of the card, of this process's context too; 0 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _serve(flags: Sequence[str]) -> None:
    """A process that answers whenever a line comes. It imports no more of torch than an engine's own."""
    from headrace.torch_environment import leave_out_compilers

    leave_out_compilers()
    from headrace import LLM
    from headrace.config import EngineConfig
    from headrace.flags import CommandParser, add_config_flags, add_model_argument, engine_config
    from headrace.request import SamplingParams

    parser = CommandParser(prog="python -m lab.share")
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig)
    with LLM.from_config(engine_config(parser.parse_args(list(flags)))) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

        def answer() -> list[int]:
            ask = {"prompt_token_ids": list(range(1, 33))}
            return list(llm.generate([ask], params, use_tqdm=False)[0].outputs[0].token_ids)

        weights = next((each.reason for each in llm.info.decisions if each.value == "shared"), "not shared")
        stages = llm.engine.core.executor.info.start_seconds
        said = {"answer": answer(), "weights": weights, "stages": stages, "memory": dict(llm.info.memory)}
        print(json.dumps(said), flush=True)
        while sys.stdin.readline().strip() == "again":
            print(json.dumps({"answer": answer()}), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1:])
