"""What a running engine says about itself; the same in its own process and across the socket.

What lives here: one frozen description, and what it rules out. What may not: torch, anything that changes while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config import Decision
from headrace.errors import InvalidRequest
from headrace.spec import PoolingSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Everything validators, servers and ``doctor`` need to know of an engine. Sizes in tokens unless said."""

    model: str  # as the user named it, or "demo"
    served_names: tuple[str, ...]  # names the API answers to, the first one is reported
    max_model_len: int
    max_sequence_tokens: int  # longest sequence that can be served: the context, or the whole cache if that is smaller
    vocab_size: int  # width of the logits
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    decisions: tuple[Decision, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)  # bytes by purpose
    techniques: dict[str, str] = field(default_factory=dict)  # "on", "off" or a value, by name
    max_num_batched_tokens: int = 0  # a step
    num_blocks: int = 0  # of the cache
    block_size: int = 16
    can_sleep: bool = False
    task: str = "generate"  # or embed, or score
    pooling: PoolingSpec | None = None  # what becomes of prompts, where they are not answered
    segments: int = 0  # kinds of tokens, of a model that tells the texts of a pair apart by them


def check_sleep(info: EngineInfo, level: int = 1) -> None:
    """Raises InvalidRequest."""
    if not info.can_sleep:
        raise InvalidRequest("This engine cannot sleep; start it with enable_sleep_mode (--enable-sleep-mode).")
    if level not in (1, 2):
        raise InvalidRequest(f"level is {level!r}; give 1 (weights in host memory) or 2 (nothing kept).", param="level")
