"""What callers get of models that pool: embeddings and scores, from the engine's bytes.

What lives here: reading a pooled result, cosines, the outputs that users hold. What may not: pooling itself
(layers/pooling.py), requests, wire formats.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING

from headrace.errors import InvalidRequest
from headrace.request import check_integer
from headrace.spec import PoolingSpec

if TYPE_CHECKING:
    Floats = array[float]
else:
    Floats = array


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What a caller may ask of an embedding. ``dimensions``: its first ones alone, at length 1 again where the model's
    are (Matryoshka, Kusupati et al. 2022)."""

    dimensions: int | None = None

    def check(self, width: int) -> None:
        """``width``: of the model's embeddings. Raises InvalidRequest."""
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, width)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """As vLLM's."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """As vLLM's. ``prompt_token_ids``: of the pair, or where two embeddings were compared of both, one after the
    other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int] = field(default_factory=list)
    finished: bool = True


def embedding(pooled: bytes, pooling: PoolingSpec, params: PoolingParams | None = None) -> Floats:
    """float32 values."""
    values = array("f", pooled)
    if params is None or params.dimensions is None or params.dimensions >= len(values):
        return values
    values = values[: params.dimensions]
    length = math.hypot(*values) if pooling.normalize else 0.0
    return array("f", (value / length for value in values)) if length else values


def score(pooled: bytes, pooling: PoolingSpec, activation: bool | None = None) -> float:
    """From 0 to 1; with ``activation`` off, the logit. None: as the checkpoint says."""
    (logit,) = array("f", pooled)
    if not (pooling.sigmoid if activation is None else activation):
        return logit
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1.0 + math.exp(logit))


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """0 where one of them has no length."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(mul, first, second)) / lengths if lengths else 0.0


def paired(
    first: str | Sequence[str], second: str | Sequence[str], names: tuple[str, str] = ("data_1", "data_2")
) -> list[tuple[str, str]]:
    """One text with each of several, or pair by pair. Raises InvalidRequest."""
    texts = [[each] if isinstance(each, str) else list(each) for each in (first, second)]
    for name, many in zip(names, texts, strict=True):
        if not many or not all(isinstance(text, str) for text in many):
            raise InvalidRequest(f"{name} must be a text or a list of texts, and not empty.", param=name)
    if len(texts[0]) == 1:
        texts[0] *= len(texts[1])
    if len(texts[0]) != len(texts[1]):
        counts = f"{names[0]} has {len(texts[0])} texts and {names[1]} {len(texts[1])}"
        raise InvalidRequest(f"{counts}; give one for all, or as many.", param=names[1])
    return list(zip(*texts, strict=True))
