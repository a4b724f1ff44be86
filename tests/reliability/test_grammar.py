"""The checks of checks_grammar.py in their fast form, each with a planted defect that turns it red."""

from __future__ import annotations

import pytest

from tests.reliability import checks_grammar
from tests.support.planted import planted


def test_what_is_asked_for_is_refused_by_name_or_followed() -> None:
    checks_grammar.totality(64)


def test_an_answer_that_does_not_keep_to_it_is_noticed() -> None:
    defect = """
        from dataclasses import replace
        from headrace.engine import client
        from headrace.request import Request
        pack = client.pack
        def forget(frame):
            asked = isinstance(frame, Request)
            return pack(replace(frame, params=replace(frame.params, structured_outputs=None)) if asked else frame)
        client.pack = forget
    """
    with pytest.raises(AssertionError):
        checks_grammar.totality(32, command=planted(defect))


def test_different_schemas_fill_no_more_than_their_cache() -> None:
    checks_grammar.different_schemas(96)


def test_a_verdict_that_keeps_too_much_is_noticed() -> None:
    defect = """
        from headrace.engine.grammar_check import GrammarCheck
        verdict = GrammarCheck._try_out
        GrammarCheck._try_out = lambda self, *asked: kept.append(b"x" * 2**20) or verdict(self, *asked)
        kept = []
    """
    with pytest.raises(AssertionError, match="processes have grown"):
        checks_grammar.different_schemas(96, command=planted(defect))
