"""What a prompt's hidden states become where no token follows: one vector, or a score.

What lives here: choosing and averaging hidden states, the classification head. What may not: which chunk is whose
(worker/), what a checkpoint asks for (models/pooling.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.sites import classifier
from headrace.spec import DecoderSpec, PoolHead


@dataclass(frozen=True, slots=True)
class Pooled:
    """Where the prompts of a step lie among its hidden states; n of them."""

    first: Tensor  # [n], int64
    last: Tensor  # [n], int64


class Pooler(nn.Module):
    """Of a model whose PoolingSpec says how."""

    def __init__(self, spec: DecoderSpec, context: LayerContext) -> None:
        super().__init__()
        assert spec.pooling is not None
        self._spec = spec.pooling
        layers = {site.name.removeprefix("pooler."): Linear(site, context) for site in classifier(spec)}
        self.dense, self.output = layers.get("dense"), layers.get("output")

    def forward(self, hidden: Tensor, places: Pooled) -> Tensor:  # [tokens, hidden] → [n, hidden], or [n, 1]; float32
        pooled = self._pooled(hidden, places)
        if self.dense is not None:
            pooled = torch.tanh(self.dense.forward(pooled))
        if self.output is not None:
            pooled = self.output.forward(pooled)
        return F.normalize(pooled.float(), dim=1) if self._spec.normalize else pooled.float()

    def verdict(self, logits: Tensor) -> Tensor:  # [n, vocabulary] → [n, 1], float32
        """Of a score that two tokens make."""
        for_it, against = self._spec.tokens
        return (logits[:, for_it].float() - logits[:, against].float()).unsqueeze(1)

    @property
    def of_tokens(self) -> bool:
        return self._spec.head is PoolHead.TOKENS

    def _pooled(self, hidden: Tensor, places: Pooled) -> Tensor:  # [n, hidden], in the type of ``hidden``
        if self._spec.kind != "mean":
            return hidden[places.last if self._spec.kind == "last" else places.first]
        lengths = places.last - places.first + 1
        sums = torch.zeros(len(lengths), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        token = torch.arange(len(hidden), device=hidden.device)
        owner = torch.bucketize(token, places.last)  # a token after the last prompt has none
        inside = owner < len(lengths)
        inside &= token >= places.first[owner.clamp_max(len(lengths) - 1)]
        weights = inside.float().unsqueeze(1)
        sums.index_add_(0, owner.clamp_max(len(lengths) - 1), hidden.float() * weights)
        return (sums / lengths.unsqueeze(1)).to(hidden.dtype)
