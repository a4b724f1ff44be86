"""``python -m lab embeddings``: texts embedded by the engine and by transformers in a torch loop, in turn, in one process.

The loop does what sentence-transformers does: texts sorted by length, batches of 32 padded to their longest, pooled and
normalized. Times are wall-clock, or with --cpu-time the process's CPU seconds, which other processes on the machine
hardly change.

What lives here: both sides and their rates. What may not: pooling (the engine's).
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from headrace.bench.arguments import count
from headrace.config import EngineConfig
from headrace.errors import ConfigError

BATCH = 32  # sentence-transformers'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=count, default=256, help="number of texts (default: 256)")
    parser.add_argument("--repeats", type=count, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds instead of wall-clock time")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    import numpy as np
    import torch

    from headrace import LLM

    if config.model.model is None:
        raise ConfigError("give a checkpoint that transformers reads, with --model.")
    transformers: Any = importlib.import_module("transformers")
    random = np.random.default_rng(config.model.seed)
    with LLM.from_config(config) as llm:
        torch.set_num_threads(config.device.threads or torch.get_num_threads())
        model = transformers.AutoModel.from_pretrained(config.model.model, dtype=torch.float32).eval()
        longest = min(250, llm.info.max_sequence_tokens)
        lengths = np.clip(random.lognormal(4.0, 0.7, args.texts), 6, longest).astype(int)
        texts = [random.integers(4, llm.info.vocab_size, length).tolist() for length in lengths]

        def engine() -> list[Any]:
            found = llm.embed([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)
            return [np.array(each.outputs.embedding) for each in found]

        def loop() -> list[Any]:
            return embedded(model, texts, llm.info.pooling)

        sides = {"headrace": engine, "torch loop": loop}
        first, second = (side() for side in sides.values())
        cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(first, second, strict=True)]
        clock = time.process_time if args.cpu_time else time.perf_counter
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, side in sides.items():
                rates[name].append(int(lengths.sum()) / timed(side, clock))
    print(f"{args.texts} texts, {lengths.sum()} tokens; least cosine {min(cosines):.8f}")
    unit = "tokens per CPU second" if args.cpu_time else "tokens/s"
    for name, values in rates.items():
        print(f"{name:10}  {median(values):,.0f} {unit} ({min(values):,.0f} to {max(values):,.0f})")
    return 0


def timed(side: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    side()
    return clock() - begin


def embedded(model: Any, texts: Sequence[Sequence[int]], pooling: Any) -> list[Any]:
    """In the order of ``texts``, float32."""
    import torch

    order = sorted(range(len(texts)), key=lambda each: -len(texts[each]))
    found: list[Any] = [None] * len(texts)
    with torch.inference_mode():
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(texts[each]) for each in part], batch_first=True)
            lengths = torch.tensor([len(texts[each]) for each in part])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            if pooling.kind == "mean":
                vectors = (hidden * mask[..., None]).sum(1) / lengths[:, None]
            else:
                vectors = hidden[torch.arange(len(part)), lengths - 1 if pooling.kind == "last" else 0]
            if pooling.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
            for place, each in enumerate(part):
                found[each] = vectors[place].numpy()
    return found
