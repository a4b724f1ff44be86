"""The tensors of one layer by their names on disk, until they are written.

Input channels may be multiplied by factors that their producer divides by: the result is unchanged, but rounding
becomes easier.

    AWQ          weights of inputs that are large on average grow, so that they are rounded more finely (Lin et al.
    2023)
    SmoothQuant  inputs with large maxima shrink, so that they can be rounded, too (Xiao et al. 2022)

What lives here: its matrices, their inputs, the factors and how they move. What may not: how codes are chosen, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.checkpoint import Checkpoint, KeyNames
from headrace.models.weight_rules import StoredMatrix, disk_name, stored_matrices, weight_rules
from headrace.quant import Format
from headrace.quantize.blocks import BlockRunner, Inputs, Seen
from headrace.quantize.gptq import output_error
from headrace.quantize.grid import Grid, fit
from headrace.sites import Role, Weight, layer_weights
from headrace.spec import DecoderSpec

_STEPS = 20  # exponents of factors that are tried
_MATRICES = (Role.QKV, Role.OUTPUT, Role.UP, Role.DOWN)


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes matrices of one format. ``method``: how codes are chosen; ``form``: the checkpoint convention, ``layout``: the
    format's name in it."""

    name: str
    method: str
    layout: str
    grid: Grid
    form: str = "headrace"

    def problem(self, outs: int, ins: int) -> str | None:
        """Why a matrix of this shape cannot be written in this format."""
        return None

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        """Its tensors, by the suffix of their names. ``weight`` [outs, ins], float32; ``seen``: its inputs during
        calibration; ``most``: the largest weight among those merged with it; ``form``: as an engine will hold it."""
        raise NotImplementedError(self.name)

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        return {"quant_method": self.form, "format": self.layout, "ignore": list(ignored)}


@dataclass(frozen=True, slots=True)
class Job:
    """``rows``: for calibration; ``held``: for evaluation. A recipe whose method is ``rtn`` needs no rows."""

    spec: DecoderSpec
    checkpoint: Checkpoint
    recipe: Maker
    rows: Sequence[Sequence[int]] = ()
    held: Sequence[Sequence[int]] = ()


class Layer:
    def __init__(self, job: Job, target: DecoderSpec, index: int, runner: BlockRunner) -> None:
        self._job, self._index, self._runner = job, index, runner
        names = KeyNames(job.checkpoint.keys())
        rules = [rule for rule in weight_rules(job.spec) if rule.target.startswith(f"layers.{index}.")]
        keys = [names[source] for rule in rules for group in rule.sources for source in group]
        self._names = names
        self._held = {key: job.checkpoint.read(key) for key in keys}
        self._matrices = [each for each in stored_matrices(target) if each.weight.layer == index]
        self._seen: Seen = {}

    def watch(self, rows: Sequence[Tensor]) -> None:
        block = self._runner.block(self._job.spec, self._index, self._job.checkpoint)
        self._seen = self._runner.watched(block, rows, _MATRICES, self._stacked)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the form in which they are written."""
        done = set()
        for matrix in self._matrices:
            yield from ((f"{self._module(matrix)}.{name}", tensor) for name, tensor in self._made(matrix).items())
            done.add(self._key(matrix))
        yield from ((key, tensor) for key, tensor in self._held.items() if key not in done)

    def scale(self) -> None:
        """Scales the input channels of each weight whose producer can absorb the factors."""
        for role, producer in self._producers():
            seen = self._inputs(role)
            if seen is None or not seen.count:
                continue
            mine = [each for each in self._matrices if each.weight.role is role]
            kept = [self._weight(each) for each in mine]
            choose = partial(activation_aware, mean=seen.mean, gram=seen.gram, grid=self._job.recipe.grid)
            factors = choose(kept) if self._job.recipe.method == "awq" else smooth(kept, seen.most)
            self._multiply([self._key(each) for each in mine] + self._routers(role), factors)
            producer(1.0 / factors)
            for (watched, _), inputs in self._seen.items():
                if watched is role:
                    inputs.gram = inputs.gram / factors.outer(factors)

    # --- weights by name

    def _made(self, matrix: StoredMatrix) -> dict[str, Tensor]:
        merged = (each for each in self._matrices if (each.weight, each.copy) == (matrix.weight, matrix.copy))
        weight = self._weight(matrix)
        most = max(float(self._held[self._key(each)].abs().max()) for each in merged)
        return self._job.recipe.made(weight, self._seen.get((matrix.weight.role, matrix.copy)), most, matrix.form)

    def _weight(self, matrix: StoredMatrix) -> Tensor:  # [outs, ins], float32
        return finite(self._key(matrix), self._held[self._key(matrix)].to(self._runner.device).float())

    def _key(self, matrix: StoredMatrix) -> str:
        return self._names[f"{matrix.module}.weight"]

    def _module(self, matrix: StoredMatrix) -> str:
        return self._key(matrix).removesuffix(".weight")

    def _stacked(self, role: Role) -> Tensor:
        """The matrices of all experts, [experts, outs, ins]."""
        mine = [each for each in self._matrices if each.weight.role is role]
        copies = range(max(each.copy for each in mine) + 1)
        return torch.stack([torch.cat([self._weight(each) for each in mine if each.copy == copy]) for copy in copies])

    def _routers(self, role: Role) -> list[str]:
        """Other matrices with the same inputs."""
        found = [each for each in layer_weights(self._job.spec, self._index) if each.role is Role.ROUTER]
        return [self._names[f"{disk_name(self._job.spec, each)}.weight"] for each in found] if role is Role.UP else []

    def _inputs(self, role: Role) -> Inputs | None:
        """Inputs of all copies of a weight together, because they share their producer's factors."""
        found = [inputs for (watched, _), inputs in self._seen.items() if watched is role and inputs.count]
        if len(found) < 2:
            return found[0] if found else None
        total = Inputs(sum(each.count for each in found))
        total.gram, total.total = sum(each.gram for each in found), sum(each.total for each in found)  # type: ignore[assignment]
        total.most = torch.stack([each.most for each in found]).amax(0)
        return total

    def _producers(self) -> Iterator[tuple[Role, Callable[[Tensor], None]]]:
        """Weights whose inputs can be scaled, and how."""
        spec = self._job.spec
        norms = {
            each.name.rpartition(".")[2]: each for each in layer_weights(spec, self._index) if each.role is Role.NORM
        }
        yield Role.QKV, partial(self._scale_norm, norms["attention_norm"])
        yield Role.UP, partial(self._scale_norm, norms["feed_forward_norm"])
        gated = [
            each
            for each in self._matrices
            if each.weight.role is Role.UP and each.part == 1 and len(each.weight.pieces) == 2
        ]
        if gated and spec.layers[self._index].moe is None:
            yield Role.DOWN, partial(self._multiply_rows, self._key(gated[0]))
        values = [each for each in self._matrices if each.weight.role is Role.QKV and each.part == 2]
        if values and spec.num_heads == spec.num_kv_heads:
            yield Role.OUTPUT, partial(self._multiply_rows, self._key(values[0]))

    def _scale_norm(self, norm: Weight, factors: Tensor) -> None:
        name = disk_name(self._job.spec, norm)
        offset = self._job.spec.norm_offset
        for suffix, shift in (("weight", offset), ("bias", 0.0)):
            if (key := self._names.find(f"{name}.{suffix}")) is not None:
                held = self._held[key]
                self._held[key] = ((held.float() + shift) * factors.cpu() - shift).to(held.dtype)

    def _multiply(self, keys: Sequence[str], factors: Tensor) -> None:
        """Multiplies columns."""
        for key in keys:
            held = self._held[key]
            self._held[key] = (held.float() * factors.cpu()).to(held.dtype)

    def _multiply_rows(self, key: str, factors: Tensor) -> None:
        module = key.removesuffix(".weight")
        for each in (key, f"{module}.bias"):
            if each in self._held:
                held = self._held[each]
                shape = (-1, *(1 for _ in range(held.dim() - 1)))
                self._held[each] = (held.float() * factors.cpu().view(shape)).to(held.dtype)


def finite(key: str, tensor: Tensor) -> Tensor:
    """Raises ConfigError for values that are not finite."""
    if bad := int((~tensor.isfinite()).sum()):
        raise ConfigError(
            f"{key} holds {bad} values that are NaN or infinite, of {tensor.numel()}; fetch the checkpoint again, or another one."
        )
    return tensor


def activation_aware(weights: Sequence[Tensor], mean: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """Factors [ins] that weights [outs, ins] with the same inputs are multiplied by. ``mean``: of the inputs'
    magnitudes, [ins]."""
    size = mean.float().clamp(min=1e-6)
    best, least = torch.ones_like(size), float("inf")
    for step in range(_STEPS):
        factors = size.pow(step / _STEPS)
        factors = (factors / (factors.amax() * factors.amin()).sqrt()).clamp(1e-4, 1e4)
        error = 0.0
        for weight in weights:
            scaled = weight.float() * factors
            error += output_error(weight, fit(scaled, grid).rounded(scaled) / factors, gram)
        if error < least:
            best, least = factors, error
    return best


def smooth(weights: Sequence[Tensor], most: Tensor) -> Tensor:
    """Factors [ins] likewise, which move half of the inputs' range to the weights; ``most``: the inputs' largest
    magnitudes, [ins]."""
    heaviest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0).clamp(min=1e-5)
    return (most.float().clamp(min=1e-5).sqrt() / heaviest.sqrt()).clamp(1e-4, 1e4)
