"""Documentation that can be checked is checked: generated pages, links, and the source files they name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import headrace
from headrace import cli
from headrace.flags import elsewhere
from lab import __main__ as lab
from tests.reliability import mutants, simulate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Flags of other programs, and of other engines in the table that says what to write instead.
FOREIGN = {
    "--apply", "--backend", "--group", "--constraint", "--data", "--tasks", "--index-url", "--rm", "--gpus", "--time", "--unix-socket",
    "--enforce-budgets", "--minutes", "--controls", "--revision", "--quantization",
}  # fmt: skip

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"(?:src/headrace/|tests/|docs/)?(?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|c|md|yaml|toml|txt)")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["configuration.md", "techniques.md", "request-fields.md"])
def test_generated_pages_say_what_the_code_says(page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert generator().PAGES[page]() == written, "run `python docs/generate.py`"


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        if "://" not in target and not (found.exists() and (not anchor or anchor in headings(found))):
            yield f"{page.relative_to(ROOT)}: {target}"


@cache
def headings(page: Path) -> set[str]:
    """As links spell them: small letters, hyphens for spaces, other signs left out."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", LINK.sub(lambda link: link[0].partition("]")[0], each).lower()).replace(" ", "-")
        for each in found
    }


def missing_files(page: Path) -> Iterator[str]:
    """Source files that a page names, relative to the repository or to src/headrace, and that are not there."""
    for text in CODE.findall(page.read_text(encoding="utf-8")):
        if (
            SOURCE.fullmatch(text)
            and "/" in text
            and not any((base / text).exists() for base in (ROOT, ROOT / "src" / "headrace"))
        ):
            yield f"{page.relative_to(ROOT)}: {text}"


def test_links_lead_somewhere() -> None:
    assert not [each for page in PAGES for each in broken_links(page)]


def test_files_that_pages_name_exist() -> None:
    assert not [each for page in PAGES for each in missing_files(page)]


def listed(entries: object) -> Iterator[str]:
    """The pages that a part of mkdocs.yml's nav leads to."""
    if isinstance(entries, str):
        yield entries
    for each in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
        yield from listed(each)


def test_every_page_is_in_the_sites_list_and_in_the_index() -> None:
    nav = list(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert len(nav) == len(set(nav)) and set(nav) == pages | {"CONTRIBUTING.md", "CHANGELOG.md", "http-api.md"}
    assert not pages - {"index.md"} - set(LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")))


def test_every_public_name_is_described() -> None:
    described = re.findall(
        r"^::: headrace\.(\w+)$", (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted([*described, "__version__"]) == sorted(headrace.__all__)


def help_text(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        lab.main([*command[1:], "--help=all"]) if command[:1] == ("lab",) else cli.main([*command, "--help=all"])
    return capsys.readouterr().out


def test_flags_that_pages_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag exists when some command's --help shows it, those of the simulation and of the mutants among them."""
    benchmarks = [
        (room, name)
        for room in ("bench", "lab")
        for name in re.findall(r"^    ([a-z-]+) ", help_text(capsys, room), re.MULTILINE)
    ]
    commands = [(name,) for name in cli.COMMANDS] + benchmarks + [("models", "remove")]
    known = (
        FOREIGN
        | elsewhere("flags").keys()
        | {flag for tool in (simulate, mutants) for flag in FLAG.findall(tool.create_parser().format_help())}
    )
    known |= {flag for command in commands for flag in FLAG.findall(help_text(capsys, *command))}
    named = {(page.name, flag) for page in PAGES for flag in FLAG.findall(page.read_text(encoding="utf-8"))}
    assert len(benchmarks) > 4 and not sorted((page, flag) for page, flag in named if flag not in known)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_cpu_build_that_pages_name_is_the_one_tested(page: str) -> None:
    """Another version would be replaced by the CUDA build when the constraints are met."""
    root = Path(__file__).parents[2]
    pinned = re.search(r"^torch==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and f"pip install torch=={pinned[1]} --index-url" in (root / page).read_text(encoding="utf-8")
