"""The table of other people's clients agrees with the files it names, and with the page for users."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients import catalog, questions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", catalog.GROUPS)
def test_a_group_names_one_version_of_each_client_and_tests_that_exist(name: str) -> None:
    group = catalog.GROUPS[name]
    assert all(re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.]+", client) for client in group.clients)
    assert all(re.fullmatch(r"(@[\w-]+/)?[\w-]+@[\d.]+", package) for package in group.npm) and (
        group.clients or group.npm
    )
    assert all((ROOT / "tests" / test).is_file() for test in group.tests)
    assert {f"## {section}" for section in group.sections} <= set(PAGE.splitlines())


def test_every_test_of_a_client_and_every_example_belongs_to_a_group() -> None:
    groups = catalog.GROUPS.values()
    files = {f"clients/{path.name}" for path in (ROOT / "tests" / "clients").glob("test_*.py")}
    assert files - {test for group in groups for test in group.tests} == {"clients/test_page.py"}
    examples = {
        section.partition("\n")[0]
        for section in PAGE.split("\n## ")[1:]
        if re.search("^```(python|javascript)$", section, re.M)
    }
    assert examples == {section for group in groups for section in group.sections}


def test_the_seed_of_scripted_answers_is_the_scripted_servers() -> None:
    text = (ROOT / "tests" / "server" / "fake_engine.py").read_text(encoding="utf-8")
    assert re.search(rf"^SCRIPTED = {questions.SCRIPTED}\b", text, re.M)
