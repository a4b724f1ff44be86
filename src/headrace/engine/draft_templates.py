"""Whether a draft model was trained on conversations that look like the target's: what both templates make of some, not
how they are written.

What lives here: that check, at start. What may not: rendering (template.py), other checks of drafts
(worker/draft_setup.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.template import CALL
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError, InvalidRequest, ModelError
from headrace.models.source import ModelSource, TokenizerFiles, find_model
from headrace.speculative.settings import read_settings

_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
_USER, _SYSTEM = {"role": "user", "content": "Where is it?"}, {"role": "system", "content": "You are brief."}
_CONVERSATIONS: tuple[tuple[Sequence[Any], Sequence[Any] | None], ...] = (
    ((_USER,), None),
    ((_SYSTEM, _USER, {"role": "assistant", "content": "There."}, {"role": "user", "content": "Two\nlines of <text>."}), None),
    ((_USER,), (_TOOL,)),
    ((_SYSTEM, _USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "seen"}), (_TOOL,)),
)  # fmt: skip


def check_draft_templates(config: EngineConfig, target: ModelSource) -> None:
    """Raises ConfigError where the templates of a draft model and its target make different texts of a conversation; a
    model without one is taken at its word, and one that is not found is for the worker to name."""
    settings = read_settings(config.scheduler.speculative_config)
    if settings is None or settings.model is None:
        return
    try:
        draft = find_model(replace(config.model, model=settings.model, load_format="dummy", quantization=None))
    except ModelError:
        return
    own, wanted = draft.tokenizer_files(), target.tokenizer_files()
    if own is None or wanted is None or not own.templates or not wanted.templates or own.templates == wanted.templates:
        return
    for mine, theirs in zip(_rendered(own), _rendered(wanted), strict=True):
        if mine != theirs:
            raise ConfigError(
                f"speculative_config.model {draft.name} has another chat template than {target.name}: of the same conversation it makes "
                f"{_around(mine, theirs)}, the target {_around(theirs, mine)}; give a draft of its family."
            )


def _rendered(files: TokenizerFiles) -> Iterator[str]:
    """Each conversation, or why there is none."""
    tokenizer = Tokenizer(files)
    try:
        for messages, tools in _CONVERSATIONS:
            try:
                yield tokenizer.apply_chat_template(messages, tools)
            except (InvalidRequest, ModelError):
                yield "nothing"
    finally:
        tokenizer.close()


def _around(text: str, other: str) -> str:
    """Where the first difference is."""
    at = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[max(0, at - 10) : at + 20])
