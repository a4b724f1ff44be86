"""Runs one block of a model at a time: loads it, feeds it rows of hidden states, observes it.

What lives here: running blocks, and sums over their matrices' inputs. What may not: grids, files that are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from headrace.kernels import Kernels
from headrace.kernels.inputs import AttentionInputs, ForwardInputs, LayerStep
from headrace.kernels.moe.reference import route
from headrace.kernels.norm.reference import gated_activation
from headrace.layers.context import LayerContext
from headrace.layers.linear import Stream
from headrace.layers.moe import SparseFeedForward
from headrace.layers.rotary import rotary_table
from headrace.models.checkpoint import Checkpoint
from headrace.models.decoder import Block, Decoder, finish_modules
from headrace.models.loader import load_weights
from headrace.models.weight_rules import weight_rules
from headrace.sites import Role
from headrace.spec import DecoderSpec

_BLOCK_SIZE = 16  # of the cache that one row's keys and values pass through
_OTHERS = (r".*",)  # keys that are not this part's


@dataclass(slots=True)
class Inputs:
    """Statistics of one matrix's inputs, [n, ins]: xᵀx, and for each input the sum of its magnitudes and the largest.
    float32."""

    count: int = 0
    gram: Tensor = field(default_factory=lambda: torch.zeros(()))
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    most: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        if not len(x):
            return
        sizes = x.abs()
        self.count += len(x)
        self.gram = self.gram.to(x.device) + x.T @ x
        self.total = self.total.to(x.device) + sizes.sum(0)
        self.most = torch.maximum(self.most.to(x.device), sizes.amax(0))

    @property
    def mean(self) -> Tensor:
        return self.total / max(self.count, 1)


def gram_of(seen: Inputs | None, device: torch.device) -> Tensor | None:
    """None for an expert that no row came to."""
    return None if seen is None or not seen.count else seen.gram.to(device)


Seen = dict[tuple[Role, int], Inputs]  # by the matrix's role and, of experts, the expert; else 0


class BlockRunner:
    """The blocks of one model, on one device, over rows of up to ``length`` tokens."""

    def __init__(self, spec: DecoderSpec, *, dtype: torch.dtype, device: torch.device, length: int) -> None:
        self.dtype, self.device, self._length, self._spec = dtype, device, length, spec
        self._kernels = Kernels(device)
        self._cos_sin = None if spec.rope is None else rotary_table(spec.rope, length, device)
        blocks = -(-length // _BLOCK_SIZE)
        shape = (blocks, spec.num_kv_heads, _BLOCK_SIZE, spec.head_dim)
        self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._table = torch.arange(blocks, dtype=torch.int32, device=device)[None]

    def ends(self, checkpoint: Checkpoint, spec: DecoderSpec | None = None) -> Decoder:
        """The parts before the first block and after the last. ``spec``: the model's with formats."""
        bare = Decoder(
            replace(spec or self._spec, layers=()),
            kernels=self._kernels,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self._length,
        )
        load_weights(bare, checkpoint, weight_rules(bare.spec), _OTHERS, self.dtype)
        bare.finish_loading()
        return bare

    def block(self, spec: DecoderSpec, index: int, checkpoint: Checkpoint) -> Block:
        """``spec``: this model's, or the same with formats."""
        context = LayerContext(self.dtype, self.device, self._kernels)
        holder = nn.Module()
        holder.layers = nn.ModuleDict({str(index): Block(spec, index, self._cos_sin, context)})
        rules = (rule for rule in weight_rules(spec) if rule.target.startswith(f"layers.{index}."))
        load_weights(holder, checkpoint, rules, _OTHERS, self.dtype)
        (block,) = holder.layers.values()
        assert isinstance(block, Block)
        with torch.inference_mode():
            finish_modules(block)
        return block

    def embedded(self, ends: Decoder, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """[tokens, hidden] of each row."""
        return [ends.embedded(self._inputs(torch.tensor(row, device=self.device))) for row in rows]

    def run(self, block: Block, rows: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode():
            return [self._run(block, row) for row in rows]

    def watched(
        self, block: Block, rows: Sequence[Tensor], roles: Sequence[Role], weights: Callable[[Role], Tensor]
    ) -> Seen:
        """The inputs of its matrices. ``weights``: of experts, [experts, outs, ins]."""
        seen: Seen = {}
        linears = {Role.QKV: block.attention.qkv, Role.OUTPUT: block.attention.output}
        if isinstance(block.feed_forward, SparseFeedForward):
            self._watch_experts(block.feed_forward, seen, weights)
        else:
            linears |= {Role.UP: block.feed_forward.up, Role.DOWN: block.feed_forward.down}
        for role, linear in linears.items():
            if role in roles:
                linear.watch(seen.setdefault((role, 0), Inputs()).add)
        self.run(block, rows)
        return seen

    def _watch_experts(self, layer: SparseFeedForward, seen: Seen, weights: Callable[[Role], Tensor]) -> None:
        layers = [each for each in self._spec.layers if each.moe is not None]
        moe, up = layers[0].moe, weights(Role.UP)
        assert moe is not None

        def see(x: Tensor, router_logits: Tensor) -> None:
            _, chosen = route(router_logits, moe.top_k, moe.renormalize)
            for expert in range(moe.num_experts):
                mine = x[(chosen == expert).any(1)]
                seen.setdefault((Role.UP, expert), Inputs()).add(mine)
                inner = gated_activation(mine.float() @ up[expert].to(mine.device).float().T, self._spec.activation)
                seen.setdefault((Role.DOWN, expert), Inputs()).add(inner)

        layer.watch(see)

    def _run(self, block: Block, row: Tensor) -> Tensor:
        stream = Stream(row, False, False)
        inputs = self._inputs(torch.zeros(len(row), dtype=torch.int64, device=self.device))
        step = LayerStep(inputs.positions, inputs.attention[0], self._keys, self._values)
        block.forward(stream, step, block.attention_norm)
        return stream.whole()

    def _inputs(self, ids: Tensor) -> ForwardInputs:
        """One row, as a prompt whose keys and values are at the beginning of the cache."""
        count = len(ids)
        places = torch.arange(count, device=self.device)
        whole = torch.tensor([count], dtype=torch.int32, device=self.device)
        start = torch.tensor([0, count], dtype=torch.int32, device=self.device)
        attention = AttentionInputs(self._table, start, whole, places, _BLOCK_SIZE, count, count)
        return ForwardInputs(ids, places, (attention,))
