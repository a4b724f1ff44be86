"""A draft head as it computes: one layer over its own paged KV, which goes on from the target's hidden states.

What lives here: the module. What may not: layouts and names (heads.py), rows and proposing (worker/draft_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.kernels.inputs import ForwardInputs, LayerStep
from headrace.layers.basic import Embedding, RMSNorm
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear, Stream
from headrace.layers.rotary import rotary_table
from headrace.models.checkpoint import Checkpoint, KeyNames
from headrace.models.decoder import Block, Decoder, finish_modules
from headrace.models.heads import HeadSpec, head_rules, head_weights, ignored_by, layer_of
from headrace.models.loader import load_weights


class _Normed(Protocol):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


class DraftHead(nn.Module):
    """Filled as a Decoder is. What it shares with ``target`` stays the target's."""

    def __init__(self, spec: HeadSpec, target: Decoder, context: LayerContext, max_model_len: int) -> None:
        super().__init__()
        sites, block = {each.name: each for each in head_weights(spec)}, spec.block
        assert block.rope is not None
        context = replace(context, composes=False, kv=None, group=None)
        self.spec = spec
        self.embedding = Embedding(sites["embedding"], context) if spec.own_embedding else None
        self.embedding_norm = self._norm("embedding_norm", context)
        self.hidden_norm = self._norm("hidden_norm", context)
        self.fc = Linear(sites["fc"], context)
        cos_sin = rotary_table(block.rope, max_model_len, context.device)
        layer = Block(block, 0, cos_sin, context, {each.role: each for each in layer_of(spec) if each.ins})
        self.layers = nn.ModuleList([layer])
        self.norm = self._norm("norm", context)
        self.head = Linear(sites["head"], context) if spec.own_head else None
        self._block = layer
        assert target.embedding is not None, "no stage of a pipeline drafts"
        self._embed, self._logits = target.embedding.forward, target.logits
        self._device = context.device
        self._targets: Tensor | None = None  # [own tokens], int64: which of the target's each is

    def _norm(self, name: str, context: LayerContext) -> RMSNorm | None:
        block = self.spec.block
        if name not in self.spec.form.words:
            return None
        return RMSNorm(block.hidden_size, block.norm_eps, context, offset=block.norm_offset)

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Raises ModelError for tensors that are missing, too many, of another shape, or not finite."""
        load_weights(self, checkpoint, head_rules(self.spec), ignored_by(self.spec), dtype)
        for name, parameter in self.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise ModelError(f"tensor {name} of this draft head holds NaN or infinity; download it again.")
        if self.spec.mapped:
            self._read_map(checkpoint)

    def _read_map(self, checkpoint: Checkpoint) -> None:
        """``d2t`` [own tokens]: how much higher the target's id of each is."""
        key, own, tokens = KeyNames(checkpoint.keys()).find("d2t"), self.spec.block.vocab_size, self.spec.target_vocab
        if key is None:
            raise ModelError(f"this draft head draws from {own} tokens of {tokens} and has no d2t that says which.")
        if checkpoint.shape(key) != (own,) or checkpoint.dtype(key).is_floating_point:
            shape, dtype = list(checkpoint.shape(key)), checkpoint.dtype(key)
            raise ModelError(f"d2t of this draft head is {dtype} {shape}, but it draws from {own} tokens.")
        found = checkpoint.read(key).long() + torch.arange(own)
        if found.min() < 0 or found.max() >= tokens or len(found.unique()) < own:
            raise ModelError(
                f"d2t of this draft head does not name {own} of the target's {tokens} tokens; fetch it again."
            )
        self._targets = found.to(self._device)

    def finish_loading(self) -> None:
        """As a decoder's, once."""
        if self.spec.mapped and self._targets is None:  # made-up weights
            self._targets = torch.arange(self.spec.block.vocab_size, device=self._device)
        finish_modules(self)

    def carried(self, tapped: Tensor) -> Tensor:  # [tokens, spec.tapped] → [tokens, spec.carried]
        """What entries take of the target's hidden states."""
        return self.fc.forward(tapped) if self.spec.form.beside else tapped

    def write(self, inputs: ForwardInputs, carried: Tensor, kv_cache: Tensor) -> None:
        """Keys and values of entries alone. ``inputs.token_ids``: the token after each entry's position."""
        _, x = self._begun(inputs.token_ids, carried)
        self._block.attention.write(self._block.attention.qkv.forward(x), self._step(inputs, kv_cache))

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor], carried: Tensor) -> Tensor:
        """What ``logits`` takes, [tokens, hidden]; and in ``carried`` then, what the next entry takes."""
        stream, x = self._begun(inputs.token_ids, carried)
        last = self.norm if self.norm is not None else self._block.feed_forward_norm
        step = self._step(inputs, kv_caches[0])
        self._block.forward_projected(stream, self._block.attention.qkv.forward(x), step, last)
        out = stream.whole()
        normed = out if self.norm is None else self.norm.forward(out)[0]
        carried.copy_(normed if self.spec.form.goes_on_normed else out)
        return normed

    def megakernel_context(self, rows: int, block_size: int) -> int:
        """As a decoder's."""
        return 0

    def least_shared(self, rows: int) -> int | None:
        """As a decoder's: few sequences draft."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] → [n, the target's tokens]
        """Tokens that it cannot draw have -inf."""
        if self.head is None:
            return self._logits(hidden)
        own = self.head.forward(hidden)
        if self._targets is None:
            return own
        return own.new_full((len(own), self.spec.target_vocab), float("-inf")).index_copy_(1, self._targets, own)

    def greedy(self, hidden: Tensor, largest: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """As a decoder's."""
        return largest(self.logits(hidden))

    def _begun(self, token_ids: Tensor, carried: Tensor) -> tuple[Stream, Tensor]:
        """The residual stream, and what q, k and v are made of."""
        embedded = self._embed(token_ids) if self.embedding is None else self.embedding.forward(token_ids)
        first = self._block.attention_norm
        if self.spec.form.beside:
            normed = _normed(self.hidden_norm, carried)
            stream = Stream(normed if self.spec.normed_residual else carried, takes_norms=False, takes_sums=False)
            return stream, torch.cat((_normed(first, embedded), normed), dim=-1)
        pair = _normed(self.embedding_norm, embedded), _normed(self.hidden_norm, carried)
        x = self.fc.forward(torch.cat(pair[::-1] if self.spec.form.hidden_first else pair, dim=-1))
        return Stream(x, takes_norms=False, takes_sums=False), _normed(first, x) if self.spec.form.first_norm else x

    @staticmethod
    def _step(inputs: ForwardInputs, kv_cache: Tensor) -> LayerStep:
        keys, values = kv_cache[:, 0].unbind(1)
        return LayerStep(inputs.positions, inputs.attention[0], keys, values)


def _normed(norm: _Normed | None, x: Tensor) -> Tensor:
    return x if norm is None else norm.forward(x)[0]
