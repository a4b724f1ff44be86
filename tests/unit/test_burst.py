"""A burst: a request whose body has come is on its way to the engine before the next one's is parsed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.server.dialects import completions as route
from headrace.server.dialects.completions import completions, parse_completion


class At:
    """Awaitable at once, whatever it is asked for."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    async def __call__(self, *_: Any, **__: Any) -> Any:
        return self._value


@pytest.mark.parametrize(("prompts", "turns"), [(1, 0), (3, 2)])
def test_a_single_prompt_is_submitted_in_the_turn_that_parsed_it(
    prompts: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several prompts, others get their turn between two."""
    request = parse_completion({"prompt": [[5, 6, 7]] * prompts, "max_tokens": 2}, {})
    limits = SimpleNamespace(bodies=SimpleNamespace(read=At(request)), admit=lambda *_: nullcontext())
    model = SimpleNamespace(
        defaults={}, engine=SimpleNamespace(tokenizer=None), any_engine=SimpleNamespace(tokenizer=None)
    )
    prepared, delivered = SimpleNamespace(prompt_token_ids=[5, 6, 7]), list[int]()

    class Delivery:
        def __init__(self, service: Any, exchange: Any, answer: Any, requests: list[Any], *_: Any, **__: Any) -> None:
            delivered.append(len(requests))

        run = At()

    monkeypatch.setattr(route, "Delivery", Delivery)
    monkeypatch.setattr(route, "CompletionAnswer", lambda *_, **__: None)
    for name, value in (("options_of", At()), ("encode_prompt", At()), ("prepare", At(prepared))):
        monkeypatch.setattr(route.generate, name, value)
    monkeypatch.setattr(route.generate, "priced", lambda service, found, *_: (found, None))
    handling: Any = completions(
        SimpleNamespace(limits=limits, model=model),  # type: ignore[arg-type]
        SimpleNamespace(watch_disconnect=lambda: None),  # type: ignore[arg-type]
    )
    suspended = 0
    with pytest.raises(StopIteration):
        while True:
            handling.send(None)
            suspended += 1
    assert (suspended, delivered) == (turns, [prompts])
