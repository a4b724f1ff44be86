"""Quantizes a checkpoint layer by layer; only one layer, and the hidden states of the calibration rows, are in memory.

    for each layer    its float matrices, observed on what the quantized layers before it make of the rows
                      input channels scaled (AWQ, SmoothQuant), codes chosen (to nearest, or GPTQ), a file written
                      the file read back as an engine would read it, and run: the rows for the next layer

A layer whose file exists is not made again, so an interrupted run can be resumed.

What lives here: that order. What may not: how codes are chosen, layouts of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.checkpoint import KeyNames
from headrace.models.decoder import Decoder
from headrace.models.weight_rules import disk_name, stored_matrices, weight_rules, with_formats
from headrace.quant.config import read_quantization
from headrace.quantize.blocks import BlockRunner
from headrace.quantize.layer import Job, Layer, Maker, finite
from headrace.quantize.shards import Shards
from headrace.sites import Role, is_plain, weights
from headrace.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Judged:
    """On held-out rows, before and after: the perplexity, the mean divergence of the distributions (nats), and how
    often the most likely token is unchanged."""

    before: float
    after: float
    divergence: float
    agreement: float
    tokens: int


def ignored_modules(spec: DecoderSpec) -> list[str]:
    """Modules that are not quantized: the head, and experts' routers."""
    routers = [disk_name(spec, each) for each in weights(spec) if each.role is Role.ROUTER]
    return ["lm_head", *routers]


def quantised_spec(spec: DecoderSpec, recipe: Maker) -> DecoderSpec:
    """The spec that an engine will read from what ``recipe`` writes into config.json. Raises ConfigError,
    ModelError."""
    entry = recipe.entry(ignored_modules(spec))
    found = with_formats(spec, read_quantization(entry), embeddings=entry["quant_method"] == "gguf")
    for matrix in stored_matrices(found):
        if (problem := recipe.problem(matrix.outs, matrix.ins)) is not None:
            raise ConfigError(
                f"{matrix.module} cannot be quantized as {recipe.name}: {problem}. Give another --format or --group-size."
            )
    if is_plain(found):
        raise ConfigError(f"{recipe.name} is for experts, and this model has none; give another --format.")
    return found


def quantize(job: Job, runner: BlockRunner, shards: Shards, tell: Callable[[int], None]) -> Judged | None:
    """Writes all shards. ``tell`` is called with the number of finished layers. Returns None without rows for
    evaluation."""
    target = quantised_spec(job.spec, job.recipe)
    moves = bool(job.rows or job.held)
    if not shards.there(0):
        shards.write(0, _outside(job, target))
    ends = runner.ends(job.checkpoint) if moves else None
    changed = runner.ends(shards.opened(0), target) if moves and target.formats else ends
    rows = [] if changed is None else runner.embedded(changed, job.rows)
    after = [] if changed is None else runner.embedded(changed, job.held)
    before = [] if ends is None else runner.embedded(ends, job.held)
    for index in range(job.spec.num_layers):
        if not shards.there(index + 1):
            shards.write(index + 1, _layer(job, target, index, runner, rows))
        if moves:
            made = runner.block(target, index, shards.opened(index + 1))
            rows, after = runner.run(made, rows), runner.run(made, after)
            before = runner.run(runner.block(job.spec, index, job.checkpoint), before) if job.held else before
        tell(index + 1)
    return None if ends is None or changed is None or not job.held else judge(ends, changed, job.held, before, after)


def _outside(job: Job, target: DecoderSpec) -> dict[str, Tensor]:
    """Tensors outside the layers: unchanged, but for an embedding and a head that have a format."""
    names = KeyNames(job.checkpoint.keys())
    mine = {
        names[source]
        for rule in weight_rules(job.spec)
        if rule.target.startswith("layers.")
        for group in rule.sources
        for source in group
    }
    found = {key: job.checkpoint.read(key) for key in sorted(set(job.checkpoint.keys()) - mine)}
    for matrix in stored_matrices(target):
        if matrix.weight.layer is None:
            key = names[f"{matrix.module}.weight"]
            weight = finite(key, found.pop(key).float())
            made = job.recipe.made(weight, None, float(weight.abs().max()), matrix.form)
            found |= {f"{key.removesuffix('.weight')}.{name}": tensor for name, tensor in made.items()}
    return found


def _layer(job: Job, target: DecoderSpec, index: int, runner: BlockRunner, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    layer = Layer(job, target, index, runner)
    if rows:
        layer.watch(rows)
    if job.recipe.method in ("awq", "smooth"):
        layer.scale()
    return dict(layer.tensors())


def judge(
    ends: Decoder, after_ends: Decoder, rows: Sequence[Sequence[int]], before: Sequence[Tensor], after: Sequence[Tensor]
) -> Judged:
    """Compares the inputs of the heads of both models."""
    sums, tokens = torch.zeros(4, dtype=torch.float64), 0
    with torch.inference_mode():
        for row, plain, quantised in zip(rows, before, after, strict=True):
            wanted = torch.tensor(row[1:], device=plain.device)
            both = ((ends, plain), (after_ends, quantised))
            p, q = (F.log_softmax(end.logits(end.norm.forward(x[:-1])[0]).float(), -1) for end, x in both)
            losses = [float(F.nll_loss(each, wanted, reduction="sum")) for each in (p, q)]
            divergence, same = float((p.exp() * (p - q)).sum()), float((p.argmax(-1) == q.argmax(-1)).sum())
            sums += torch.tensor([*losses, divergence, same], dtype=torch.float64)
            tokens += len(wanted)
    first, second, divergence, same = (sums / tokens).tolist()
    return Judged(float(torch.tensor(first).exp()), float(torch.tensor(second).exp()), divergence, same, tokens)


def report(judged: Judged | None) -> Mapping[str, Any]:
    """The report's lines, in order."""
    if judged is None:
        return {}
    return {
        "perplexity before": f"{judged.before:.4f}",
        "perplexity after": f"{judged.after:.4f} ({judged.after / judged.before - 1:+.2%})",
        "divergence, nats per token": f"{judged.divergence:.5f}",
        "same most likely token": f"{judged.agreement:.2%}",
        "tokens in the evaluation": f"{judged.tokens:,}",
    }
