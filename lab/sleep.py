"""``python -m lab sleep``: how long an engine takes to fall asleep and to wake, beside what the link takes for its bytes.

What lives here: the times and the link. What may not: sleeping (the engine's).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from headrace.bench.arguments import amount, count
from headrace.config import EngineConfig
from lab.jobs import config_for

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=count, default=3, help="times that it sleeps at each level (default: 3)")
    parser.add_argument(
        "--pause", type=amount, default=0.0, metavar="SECONDS", help="that it sleeps, once it does (default: 0)"
    )
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 2], metavar="LEVEL", help="(default: 1 2)")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    from dataclasses import replace

    import torch

    from headrace import LLM, SamplingParams
    from headrace.worker.residency import resident_memory

    config = config_for(config.model.model or "Llama-3.1-8B", config)
    config = replace(config, device=replace(config.device, enable_sleep_mode=True))
    with LLM.from_config(config) as llm:
        llm.engine.await_kernels()
        on_gpu = torch.cuda.is_available() and config.device.device != "cpu"
        ask = {"prompt_token_ids": list(range(1, 65))}
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

        def answer() -> list[int]:
            return list(llm.generate([ask], params, use_tqdm=False)[0].outputs[0].token_ids)

        def used() -> float:
            if not on_gpu:
                return sum(resident_memory()) / GIB
            free, total = torch.cuda.mem_get_info()
            return (total - free) / GIB

        weights, before = llm.info.memory["weights"], answer()
        print(f"{llm.info.model} on {llm.info.device}: weights {weights / GIB:.2f} GiB; awake {used():.2f} GiB in use")
        if on_gpu:
            print(f"link: {link(weights):.3f} s for as many bytes from pinned memory, the best of 3")
        for level in args.levels:
            for _ in range(args.repeats):
                slept = seconds(lambda level=level: llm.sleep(level))  # type: ignore[misc]
                time.sleep(args.pause)
                asleep, woken = used(), seconds(llm.wake_up)
                first, same = seconds(answer), answer() == before
                print(
                    f"level {level}: asleep after {slept:.3f} s with {asleep:.2f} GiB in use, awake after {woken:.3f} s"
                )
                print(f"  first answer {first:.3f} s, {'the same' if same else 'ANOTHER'}")
    return 0


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def link(size: int) -> float:
    """Copies of 1 GiB at most, as many as it takes."""
    import torch

    piece = min(size, GIB)
    host, there = (
        torch.empty(piece, dtype=torch.uint8, pin_memory=True),
        torch.empty(piece, dtype=torch.uint8, device="cuda"),
    )

    def copy() -> None:
        for _ in range(-(-size // piece)):
            there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    return min(seconds(copy) for _ in range(3)) * size / (piece * -(-size // piece))
