"""Headrace: an LLM inference and serving engine.

What lives here: the public names, each imported when it is first used, so that ``import headrace`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
    from headrace.engine.client import AsyncLLM
    from headrace.engine.llm import LLM
    from headrace.engine.pooled import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput
    from headrace.errors import HeadraceError
    from headrace.request import (
        CompletionOutput,
        Logprob,
        LoRARequest,
        RepetitionDetection,
        RequestOutput,
        SamplingParams,
        StructuredOutputs,
    )

__version__ = "0.1.0"

_HOMES = {
    "config": "CacheConfig DeviceConfig EngineConfig ModelConfig SchedulerConfig ServerConfig",
    "engine.client": "AsyncLLM",
    "engine.llm": "LLM",
    "engine.pooled": "EmbeddingRequestOutput PoolingParams ScoringRequestOutput",
    "errors": "HeadraceError",
    "request": "CompletionOutput Logprob LoRARequest RepetitionDetection RequestOutput SamplingParams StructuredOutputs",
}

__all__ = [
    "LLM", "AsyncLLM", "CacheConfig", "CompletionOutput", "DeviceConfig", "EmbeddingRequestOutput", "EngineConfig", "HeadraceError",
    "LoRARequest", "Logprob", "ModelConfig", "PoolingParams", "RepetitionDetection", "RequestOutput", "SamplingParams", "SchedulerConfig",
    "ScoringRequestOutput", "ServerConfig", "StructuredOutputs", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headrace.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
