"""A workload as it is sent to an engine: conversations of one or more turns, with token ids.

Every workload is a list of conversations, whatever its kind; a plain request is a conversation of one turn. A turn
holds only its
*new* tokens: what came before (earlier turns and the answers really given) is put in front by whoever runs it.

What lives here: conversations made of what is asked. What may not: what is asked, and when (load.py); clocks, sockets,
tokenizers (ids stand for themselves in-process and towards routes that take ids, and are written as words elsewhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planner.workload.load import DrawsLengths, LoadRequest, drawn, own_ids, prompt_ids
from headrace.request import StructuredOutputs

# Short words that most vocabularies hold as one token, to write ids as text.
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what all were we when
your can said there use an each which she do how their if will up other about out many then them these so some her would make like him into
time has look two more write go see number no way could people my than first water been call who oil its now find long down day did get come
made may part
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation. ``think_seconds`` pass between the last answer and this turn.

    ``stop_after``: the answer really ends after so many tokens, though up to ``max_tokens`` were asked for (in-process
    only).
    """

    new_ids: tuple[int, ...]
    max_tokens: int
    think_seconds: float = 0.0
    stop_after: int | None = None
    structured: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """``arrival`` in seconds after the start; None = as soon as a client is free (closed loop). ``adapter``: its name."""

    turns: tuple[Turn, ...]
    arrival: float | None = None
    adapter: str | None = None


def conversations_of(asked: Sequence[LoadRequest], *, vocab_size: int, seed: int = 0) -> list[Conversation]:
    """The same requests with their ids, later turns behind those that they follow."""
    talks: list[list[Turn]] = []
    arrivals: list[float | None] = []
    talk_of: list[int] = []  # of each request
    for index, each in enumerate(asked):
        if each.follows is None:
            ids = prompt_ids(each, index, vocab_size=vocab_size, seed=seed)
            talk_of.append(len(talks))
            talks.append([])
            arrivals.append(each.at)
        else:
            said = asked[each.follows]
            ids = own_ids(index, each.prompt - said.prompt - said.output, vocab_size=vocab_size, seed=seed)
            talk_of.append(talk_of[each.follows])
        talks[talk_of[index]].append(Turn(tuple(ids), each.output, each.think))
    return [Conversation(tuple(turns), arrival) for turns, arrival in zip(talks, arrivals, strict=True)]


def random_conversations(count: int, lengths: DrawsLengths, *, vocab_size: int, seed: int = 0) -> list[Conversation]:
    """Independent requests of random ids."""
    return conversations_of(drawn(count, lengths, seed=seed), vocab_size=vocab_size, seed=seed)


def as_text(ids: Sequence[int]) -> str:
    """Ids written as common words: about a token each, equal ids the same text."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)
