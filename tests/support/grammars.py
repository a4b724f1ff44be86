"""A vocabulary for engines without a model, constraints over it, and the oracle that says what must come out.

What lives here: builders and the oracle. What may not: assertions.
"""

from __future__ import annotations

from functools import cache

from headrace.engine.grammar import Vocabulary, create_limits, create_matcher, create_tokenizer
from headrace.engine.grammar_masks import GrammarMasks
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.request import Request, StructuredOutputs
from tests.support.hash_engine import EOS, VOCAB, next_token

SPECIAL, FIRST_BYTE = 6, 8
PAIRS = [bytes([a, b]) for a in b"ab01" for b in b"ab01"]

CONSTRAINTS = (
    StructuredOutputs(regex="[ab]+"),
    StructuredOutputs(regex="[0-9]{3}-[ab]{2,6}"),
    StructuredOutputs(choice=("a", "ab", "abba", "0")),
    StructuredOutputs(json={"type": "array", "items": {"enum": ["a", "b", 10]}, "maxItems": 3}),  # type: ignore[arg-type]
    StructuredOutputs(grammar='start: "a" <|x|> "b" start?'),
)


def vocabulary() -> Vocabulary:
    """Each byte, some pairs, one special token besides EOS; ids 0 to 5 and the last hundreds stand for nothing."""
    tokens = [b""] * VOCAB
    tokens[SPECIAL], tokens[EOS] = b"<|x|>", b"<eos>"
    for index, token in enumerate([bytes([byte]) for byte in range(256)] + PAIRS):
        tokens[FIRST_BYTE + index] = token
    return Vocabulary(tokens, (SPECIAL, EOS), (EOS,))


def create_masks(constraints: tuple[StructuredOutputs, ...] = CONSTRAINTS) -> GrammarMasks:
    """With these compiled already, so that nothing waits for a thread."""
    other = _compiled(constraints)
    masks = GrammarMasks(other._vocabulary)
    masks._bridge = other._bridge
    masks._cache.update(other._cache)
    return masks


@cache
def _compiled(constraints: tuple[StructuredOutputs, ...]) -> GrammarMasks:
    from tests.support.hash_engine import request

    masks = GrammarMasks(vocabulary)
    for index, wanted in enumerate(constraints):
        masks.begin(request(index, [1], structured_outputs=wanted))
    while masks.compiling:
        masks.take_compiled(1.0)
    masks.close()
    return masks


def expected_under_grammar(request: Request, *, index: int = 0, max_model_len: int = 200) -> list[int]:
    """What the keyed-hash model says under a constraint, computed alone, with a new matcher for every token."""
    params, wanted = request.params, request.params.structured_outputs
    assert wanted is not None
    tokenizer, info = create_tokenizer(vocabulary()), keyed_hash_info(vocab_size=VOCAB)
    out: list[int] = []
    limit = min(params.max_tokens or max_model_len, max_model_len - len(request.prompt_token_ids))
    while len(out) < limit:
        matcher = create_matcher(tokenizer, wanted, create_limits())
        assert matcher.consume_tokens(out)
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(VOCAB) if bits >> token & 1]
        unwanted = (
            {EOS, *params.stop_token_ids} if len(out) < params.min_tokens else {EOS} if params.ignore_eos else set()
        )
        allowed = [token for token in allowed if token not in unwanted] or allowed
        known = [*request.prompt_token_ids, *out]
        drawn = next_token(info, known, request, index)
        out.append(drawn if drawn in allowed else allowed[next_token(info, known, request, index, width=len(allowed))])
        if out[-1] == EOS or (out[-1] in params.stop_token_ids and len(out) >= params.min_tokens):
            break
    return out
