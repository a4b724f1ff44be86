"""The check of checks_tenants.py in its fast form, with planted defects that turn it red."""

from __future__ import annotations

import pytest

from tests.reliability import checks_tenants
from tests.reliability.trend import alike
from tests.support.planted import planted

SHARED = 'from headrace.server.service import Service; Service.cache_salt = lambda self, exchange, salt: ""'
HIDDEN = "from headrace.server.wire import PromptState; PromptState.cached_tokens = property(lambda self: 0, lambda self, value: None)"


def test_another_tenants_prefix_takes_as_long_as_nobodys() -> None:
    checks_tenants.foreign_prefixes(20, chance=0.0005)


def test_a_cache_that_is_shared_is_noticed_by_what_is_told() -> None:
    with pytest.raises(AssertionError, match="are told"):
        checks_tenants.foreign_prefixes(1, command=planted(SHARED))


def test_a_cache_that_is_shared_is_noticed_by_its_time() -> None:
    with pytest.raises(AssertionError, match="seen by its time \\(p"):
        checks_tenants.foreign_prefixes(20, command=planted(f"{SHARED}\n{HIDDEN}"))


def test_samples_by_hand() -> None:
    assert alike([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert alike(list(range(20)), list(range(15, 35))) < 0.001 < 0.05 < alike(list(range(20)), list(range(2, 22)))
