"""``headrace quantize``: writes a checkpoint in fewer bits.

What lives here: the flags and the output. What may not: how it is done (quantize/).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.arguments import declare
from headrace.config import ModelConfig
from headrace.errors import ConfigError
from headrace.observe.progress import format_bytes

if TYPE_CHECKING:
    import torch

    from headrace.engine.tokenizer import Tokenizer
    from headrace.models.checkpoint import Checkpoint
    from headrace.models.source import ModelSource
    from headrace.quantize.blocks import BlockRunner
    from headrace.quantize.gguf_recipe import GGUFRecipe
    from headrace.quantize.names import Choice
    from headrace.quantize.run import Judged
    from headrace.quantize.shards import Shards
    from headrace.spec import DecoderSpec

Rows = list[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from headrace.quantize.names import FORMATS, METHODS

    formats, methods = ("; ".join(f"{name}: {text}" for name, text in each.items()) for each in (FORMATS, METHODS))
    usual = "with --calibration gptq, or smooth for w8a8; else rtn"
    method = {"choices": tuple(METHODS), "help": f"how codes are chosen ({usual}). {methods}"}
    declare(parser, "quantize.arguments", format={"help": formats}, method=method)


def run(args: argparse.Namespace) -> int:
    import torch

    from headrace.models.families import spec_from_config
    from headrace.models.loader import open_checkpoint
    from headrace.models.source import WeightFormat, find_model
    from headrace.quantize.folder import begin_folder, finish_folder
    from headrace.quantize.names import chosen, needs_text
    from headrace.quantize.run import report
    from headrace.quantize.shards import Shards
    from headrace.sites import is_plain

    choice = chosen(args.format, args.method, text=args.calibration is not None)
    source = find_model(ModelConfig(model=args.model))
    if source.weights is not WeightFormat.SAFETENSORS:
        raise ConfigError(f"{args.model} is stored as {source.weights.value}; give a checkpoint in safetensors.")
    spec = spec_from_config(source.config)
    if not is_plain(spec):
        raise ConfigError(f"{args.model} is already quantized; give the checkpoint that it was made from.")
    checkpoint = open_checkpoint(source)
    try:
        plan = _plan(args, choice, source, spec, checkpoint)
        rows, held = _rows(args, source, spec.max_positions)
        rows = rows if needs_text(choice) else []
        how = {
            "recipe": plan.said,
            "calibration": str(args.calibration),
            "rows": len(rows),
            "length": args.calibration_length,
        }
        going_on = begin_folder(args.output, source, how)
        device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        shards = Shards(args.output, spec.num_layers + 1)
        print(
            f"{source.name}: {spec.num_layers} layers to {args.format} by {choice.method} on {device.type}{', resuming' if going_on else ''}"
        )
        judged = plan.run(rows, held, device, shards, _teller(spec.num_layers))
    finally:
        checkpoint.close()
    size = shards.write_index()
    if plan.gather is not None:
        size = plan.gather(args.output)
        shards.remove()
    calibrated = {"calibrated with": f"{len(rows)} rows of {args.calibration_length} tokens"} if rows else {}
    facts = {"method": choice.method, **calibrated, **report(judged)}
    finish_folder(args.output, source, args.format, plan.config, plan.form, facts)
    for name, value in {**facts, "weights": format_bytes(size)}.items():
        print(f"{name:<26}{value}")
    print(f"Written to {args.output}. Try it: headrace chat --model {args.output}")
    return 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """``said``: what a folder to be resumed must have been created with. ``config``, ``form``: of the folder.
    ``gather``: makes one file of all that was written to it, and returns its bytes."""

    said: str
    config: dict[str, Any] | None
    form: str
    run: Callable[[Rows, Rows, torch.device, Shards, Callable[[int], None]], Judged | None]
    gather: Callable[[Path], int] | None = None


def _plan(
    args: argparse.Namespace, choice: Choice, source: ModelSource, spec: DecoderSpec, checkpoint: Checkpoint
) -> _Plan:
    """Reports whatever cannot be done before anything is read or written."""
    from headrace.models.files import read_json

    config = dict(read_json(source.path / "config.json"))
    if args.keep is not None and choice.form != "slicegpt":
        raise ConfigError(f"--keep is for slicegpt, and {choice.form} keeps all dimensions; leave it out.")
    if choice.form == "slicegpt":
        return _slicing(args, config, spec, checkpoint)
    import torch

    from headrace.quantize.gguf_recipe import GGUFRecipe
    from headrace.quantize.layer import Job
    from headrace.quantize.makers import maker_for
    from headrace.quantize.run import ignored_modules, quantised_spec, quantize

    scales = (
        torch.float16 if source.config.get("torch_dtype", source.config.get("dtype")) == "float16" else torch.bfloat16
    )
    recipe = maker_for(choice, group_size=args.group_size, asymmetric=args.asymmetric, scales=scales, spec=spec)
    quantised_spec(spec, recipe)

    def run(rows: Rows, held: Rows, device: torch.device, shards: Shards, tell: Callable[[int], None]) -> Judged | None:
        return quantize(Job(spec, checkpoint, recipe, rows, held), _runner(spec, device, rows, held), shards, tell)

    if isinstance(recipe, GGUFRecipe):
        return _Plan(repr(recipe), None, recipe.form, run, _gathering(args, source, recipe))
    config["quantization_config"] = recipe.entry(ignored_modules(spec))
    return _Plan(repr(recipe), config, recipe.form, run)


def _gathering(args: argparse.Namespace, source: ModelSource, recipe: GGUFRecipe) -> Callable[[Path], int]:
    """Looks at the tokenizer first: a rule that GGUF has no name for is told before anything is made."""
    from headrace.models.checkpoint import SafetensorsCheckpoint
    from headrace.models.source import find_tokenizer_files
    from headrace.quantize.gguf_file import write_gguf
    from headrace.quantize.gguf_vocab import tokenizer_metadata

    files = source.tokenizer_files() if args.tokenizer is None else find_tokenizer_files(args.tokenizer)
    if files is None:
        raise ConfigError(f"{args.model} has no tokenizer, which a .gguf file holds; give one: --tokenizer PATH.")
    dict(tokenizer_metadata(source, files, source.config["vocab_size"]))

    def gather(folder: Path) -> int:
        made = SafetensorsCheckpoint(folder)
        name = f"{source.path.resolve().name}-{recipe.layout}.gguf"
        try:
            return write_gguf(folder / name, source, made, recipe, files)
        finally:
            made.close()

    return gather


def _slicing(args: argparse.Namespace, config: dict[str, Any], spec: DecoderSpec, checkpoint: Checkpoint) -> _Plan:
    from headrace.models.families import spec_from_config
    from headrace.quantize.slicing import Slicing, sliced_config

    if args.group_size is not None or args.asymmetric:
        raise ConfigError(
            "--group-size and --asymmetric are for integers of few bits, and slicegpt rounds nothing; leave them out."
        )
    smaller = sliced_config(config, spec, 0.9 if args.keep is None else args.keep)
    target = spec_from_config(smaller)

    def run(rows: Rows, held: Rows, device: torch.device, shards: Shards, tell: Callable[[int], None]) -> Judged | None:
        before, after = (_runner(each, device, rows, held) for each in (spec, target))
        return Slicing(spec, target, checkpoint, rows, held).run(before, after, shards, tell)

    return _Plan(f"slicegpt to {target.hidden_size}", smaller, "transformers", run)


def _runner(spec: DecoderSpec, device: torch.device, rows: Rows, held: Rows) -> BlockRunner:
    import torch

    from headrace.quantize.blocks import BlockRunner

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return BlockRunner(spec, dtype=dtype, device=device, length=max([2, *map(len, (*rows, *held))]))


def _teller(layers: int) -> Callable[[int], None]:
    begun = time.monotonic()

    def tell(done: int) -> None:
        taken = time.monotonic() - begun
        print(f"  layer {done} of {layers}, {taken:.0f} s, {taken / done * (layers - done):.0f} s left", flush=True)

    return tell


def _rows(args: argparse.Namespace, source: ModelSource, longest: int) -> tuple[list[list[int]], list[list[int]]]:
    from headrace.engine.tokenizer import load_tokenizer
    from headrace.quantize.texts import read_rows

    for name in ("calibration_rows", "calibration_length"):
        if not 2 <= getattr(args, name) <= 2**20:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give 2 or more.")
    if args.calibration is None:
        return [], []
    tokenizer: Tokenizer | None = load_tokenizer(source, args.tokenizer)
    if tokenizer is None:
        raise ConfigError(f"{args.model} has no tokenizer, which --calibration needs; give one: --tokenizer PATH.")
    try:
        return read_rows(
            args.calibration, tokenizer, length=min(args.calibration_length, longest), count=args.calibration_rows
        )
    finally:
        tokenizer.close()
