"""Other people's clients against a real server with the bundled model, by one command, and one table of how they went.

    python -m tests.clients.run [--environments DIR] [--fresh] [--list] [GROUP …]

Run it from the repository's root, with the Python that runs Headrace. Each group of clients gets a virtual environment
of its own in a cache folder, with the versions that catalog.py names, and servers of its own. Ends with 0 only if all
passed.

What lives here: environments, and the table. What may not: versions (catalog.py), what is asked (test_*.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.cache_home import cache_home
from tests.clients.catalog import GROUPS, RUNNER, Group

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


@dataclass(frozen=True, slots=True)
class Verdict:
    group: str
    version: str
    scenario: str
    verdict: str
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict != "passed"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients.run", description="Other people's clients against a real server."
    )
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"which to try, all where none is named: {', '.join(GROUPS)}"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=cache_home() / "headrace" / "clients",
        metavar="DIR",
        help="where they are kept",
    )
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    parser.add_argument("--list", action="store_true", help="say which groups there are, with their versions, and end")
    given = parser.parse_args()
    if unknown := [name for name in given.groups if name not in GROUPS]:
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    chosen = {name: GROUPS[name] for name in given.groups or GROUPS}
    if given.list:
        print("\n".join(f"{name:18} {' '.join(group.clients + group.npm)}" for name, group in chosen.items()))
        return 0
    verdicts = [
        verdict
        for name, group in chosen.items()
        for verdict in tried(name, group, given.environments.resolve() / name, given.fresh)
    ]
    print_table(verdicts)
    return 1 if any(verdict.bad for verdict in verdicts) else 0


def tried(name: str, group: Group, folder: Path, fresh: bool) -> list[Verdict]:
    """Every scenario of a group; one row that says why where its clients cannot be installed."""
    begun = time.monotonic()
    try:
        environment(folder, group, fresh)
    except (subprocess.CalledProcessError, OSError) as error:  # OSError: there is no npm
        return [
            Verdict(
                name, versions_of(group), "installing", "failed", str(getattr(error, "stderr", None) or error).strip()
            )
        ]
    installed = time.monotonic()
    found = list(verdicts_of(name, group, folder))
    took = f"{installed - begun:.0f} s to install, {time.monotonic() - installed:.0f} s to try"
    print(f"{name}: {took}, {sum(not each.bad for each in found)} of {len(found)} passed", flush=True)
    return found


# --- environments


def environment(folder: Path, group: Group, fresh: bool) -> None:
    """Makes it, unless one with exactly these requirements is there."""
    stamp, wanted = folder / "made.json", json.dumps([RUNNER, group.clients, group.npm, sys.version])
    if not fresh and stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    command(sys.executable, "-m", "venv", str(folder))
    if group.with_torch:
        shared = [path for path in sys.path if path.endswith("-packages")]
        (site_packages(folder) / "server.pth").write_text("\n".join(shared) + "\n")
    command(python_of(folder), "-m", "pip", "install", "--quiet", *RUNNER, *group.clients)
    if group.npm:
        (folder / "node").mkdir()
        command("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder / "node"), *group.npm)
    stamp.write_text(wanted)


def command(*words: str) -> None:
    subprocess.run(words, check=True, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


def site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def versions_of(group: Group) -> str:
    """Of what the group is named after."""
    return re.split("==|@", (group.clients or group.npm)[0])[-1]


# --- scenarios


def verdicts_of(name: str, group: Group, folder: Path) -> Iterator[Verdict]:
    """What pytest says of each test, run by the clients' Python; the servers run by this one."""
    if group.npm:  # a program in JavaScript finds only what is installed beside it
        shutil.copytree(TESTS / "clients" / "node", folder / "node", dirs_exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        arguments = [
            *paths_of(group),
            "--confcutdir",
            str(TESTS / "clients"),
            "-m",
            "",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        env = {
            **os.environ,
            "HEADRACE_TEST_PYTHON": sys.executable,
            "HEADRACE_TEST_NODE": str(folder / "node"),
            "HF_HOME": scratch,
        }
        done = subprocess.run(
            [python_of(folder), "-m", "pytest", *arguments],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            yield Verdict(name, versions_of(group), "all", "failed", (done.stdout + done.stderr)[-2000:])
            return
        for case in xml.parse(report).getroot().iter("testcase"):
            yield verdict_of(name, versions_of(group), case)


def paths_of(group: Group) -> Sequence[str]:
    page = str(TESTS / "clients" / "test_page.py")
    return [
        *(str(TESTS / test) for test in group.tests),
        *(f"{page}::test_the_example_works[{section}]" for section in group.sections),
    ]


def verdict_of(group: str, version: str, case: xml.Element) -> Verdict:
    file = case.get("classname", "").rpartition(".")[2].removeprefix("test_")
    scenario = f"{file}: {case.get('name', '').removeprefix('test_').replace('_', ' ')}"
    for kind, verdict in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            return Verdict(group, version, scenario, verdict, found.get("message", "") + "\n" + (found.text or ""))
    return Verdict(group, version, scenario, "passed")


# --- the table


def print_table(verdicts: Sequence[Verdict]) -> None:
    rows = [
        ("client", "version", "scenario", "verdict"),
        *((each.group, each.version, each.scenario, each.verdict) for each in verdicts),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for each in verdicts:
        if each.bad:
            print(f"\n--- {each.group}: {each.scenario}: {each.verdict}\n{each.detail[-3000:]}")
    print(f"\n{sum(not each.bad for each in verdicts)} of {len(verdicts)} passed")


if __name__ == "__main__":
    sys.exit(main())
