"""Modules whose tests judge what is compiled name it in ``COMPILED``: it begins with the session and its tests come
last, so that kernels are compiled by one core while another interprets them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import offline


def _compiled(item: pytest.Item) -> tuple[offline.Run, ...]:
    runs: tuple[offline.Run, ...] = getattr(getattr(item, "module", None), "COMPILED", ())
    return runs


@pytest.hookimpl(trylast=True)  # after what -k and -m take out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: bool(_compiled(item)))


@pytest.fixture(scope="session", autouse=True)
def compiled_meanwhile(request: pytest.FixtureRequest) -> Iterator[None]:
    offline.PROGRAMS.begin(run for item in request.session.items for run in _compiled(item))
    yield
    offline.PROGRAMS.end()
