"""Creates a smaller dense model: the residual stream in fewer dimensions ("SliceGPT: Compress Large Language Models by
Deleting Rows and Columns", Ashkboos et al. 2024).

    the stream is rotated to the principal components of the norms' outputs, in all layers by one rotation, and the last
    are left out
    norms' factors go into the matrices after them, so a norm commutes with the rotation; the head can then no longer be
    the embedding
    a norm over fewer dimensions divides by less: its factor compensates for that

The result is a plain checkpoint of the same family. (The paper rotates each layer separately, which takes matrices
between layers that no family has.) What lives here: that. What may not: low-bit formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.checkpoint import Checkpoint, KeyNames
from headrace.models.weight_rules import weight_rules
from headrace.quantize.blocks import BlockRunner
from headrace.quantize.layer import finite
from headrace.quantize.run import Judged, judge
from headrace.quantize.shards import Shards
from headrace.sites import Role, Weight, weights
from headrace.spec import DecoderSpec, NormKind

_MULTIPLE = 32  # of which the new width is one
_READ = (Role.QKV, Role.UP, Role.ROUTER, Role.HEAD)  # from the stream; output and down write to it


def sliced_config(config: Mapping[str, Any], spec: DecoderSpec, keep: float) -> dict[str, Any]:
    """The smaller model's config. Raises ConfigError."""
    if (
        spec.norm is not NormKind.RMS
        or spec.sandwich_norm
        or spec.norm_offset
        or spec.embedding_scale
        or "rms_norm_eps" not in config
    ):
        raise ConfigError(
            f"--format slicegpt is for models whose norms are plain RMS norms, and {spec.family} has others; give another --format."
        )
    width = round(spec.hidden_size * keep / _MULTIPLE) * _MULTIPLE
    if not 0.0 < keep <= 1.0 or width < _MULTIPLE:
        least = _MULTIPLE / spec.hidden_size
        raise ConfigError(
            f"--keep {keep} leaves {width} of {spec.hidden_size} dimensions; give a fraction from {least:.2f} to 1."
        )
    eps = config["rms_norm_eps"] * spec.hidden_size / width
    return {
        **config,
        "hidden_size": width,
        "head_dim": spec.head_dim,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
    }


@dataclass(frozen=True, slots=True)
class Slicing:
    spec: DecoderSpec
    target: DecoderSpec
    checkpoint: Checkpoint
    rows: Sequence[Sequence[int]]
    held: Sequence[Sequence[int]]

    def run(self, runner: BlockRunner, made: BlockRunner, shards: Shards, tell: Callable[[int], None]) -> Judged | None:
        """Writes all shards: one pass over the layers to find the components, one to write and to evaluate."""
        basis = self._components(runner)
        for index in (None, *range(self.spec.num_layers)):
            at = 0 if index is None else index + 1
            if not shards.there(at):
                shards.write(at, dict(self._tensors(index, basis)))
        ends, after_ends = runner.ends(self.checkpoint), made.ends(shards.opened(0))
        before, after = runner.embedded(ends, self.held), made.embedded(after_ends, self.held)
        for index in range(self.spec.num_layers):
            before = runner.run(runner.block(self.spec, index, self.checkpoint), before)
            after = made.run(made.block(self.target, index, shards.opened(index + 1)), after)
            tell(index + 1)
        return judge(ends, after_ends, self.held, before, after) if self.held else None

    def _components(self, runner: BlockRunner) -> Tensor:
        """[hidden, width], float64: the largest first."""
        ends = runner.ends(self.checkpoint)
        rows = runner.embedded(ends, self.rows)
        total = torch.zeros(self.spec.hidden_size, self.spec.hidden_size, dtype=torch.float64)
        for index in range(self.spec.num_layers):
            block = runner.block(self.spec, index, self.checkpoint)
            total += sum(_normed(row) for row in rows)
            rows = runner.run(block, rows)
        total += sum(_normed(row) for row in rows)
        basis: Tensor = torch.linalg.eigh(total).eigenvectors.flip(1)
        return basis[:, : self.target.hidden_size]

    def _tensors(self, layer: int | None, basis: Tensor) -> Iterator[tuple[str, Tensor]]:
        names = KeyNames(self.checkpoint.keys())
        mine = {each.name: each for each in weights(self.spec) if each.layer == layer}
        for rule in weight_rules(self.spec):
            weight = mine.get(rule.target.removesuffix(".weight").removesuffix(".bias"))
            for source in (each for group in rule.sources for each in group):
                if weight is None:
                    continue
                held = finite(names[source], self.checkpoint.read(names[source]))
                yield names[source], self._changed(held, weight, source.endswith(".bias"), names, basis)
        if layer is None and self.spec.tied_head:
            (head,) = (each for each in weights(self.spec) if each.role is Role.HEAD)
            embedding = next(
                rule.sources[0][0] for rule in weight_rules(self.spec) if rule.target == "embedding.weight"
            )
            yield "lm_head.weight", self._changed(self.checkpoint.read(names[embedding]), head, False, names, basis)

    def _changed(self, tensor: Tensor, weight: Weight, bias: bool, names: KeyNames, basis: Tensor) -> Tensor:
        wide, own = tensor.double(), weight.name.rpartition(".")[2]
        if weight.role is Role.NORM:
            if own in ("q_norm", "k_norm"):
                return tensor.clone()
            made = torch.full((basis.shape[1],), (basis.shape[0] / basis.shape[1]) ** 0.5)
        elif weight.role is Role.EMBEDDING:
            made = wide @ basis
        elif weight.role in _READ:
            made = wide if bias else (wide * self._norm_before(weight, names)) @ basis
        else:
            made = basis.T @ wide
        return made.to(tensor.dtype)

    def _norm_before(self, weight: Weight, names: KeyNames) -> Tensor:
        name = {Role.HEAD: "norm", Role.QKV: f"layers.{weight.layer}.attention_norm"}.get(
            weight.role, f"layers.{weight.layer}.feed_forward_norm"
        )
        source = next(rule.sources[0][0] for rule in weight_rules(self.spec) if rule.target == f"{name}.weight")
        return self.checkpoint.read(names[source]).double()


def _normed(row: Tensor) -> Tensor:
    """xᵀx of rows normalized to length 1."""
    unit = torch.nn.functional.normalize(row.double().cpu(), dim=-1)
    return unit.T @ unit
