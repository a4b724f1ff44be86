"""``python -m lab masks`` over its own examples, and what it says to arguments that are none."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from headrace.bench.arguments import count, natural, output, picture, positive, share
from headrace.errors import ConfigError
from lab import masks


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    masks.add_arguments(parser)
    return parser.parse_args(words)


def test_what_masks_cost(tmp_path: Path) -> None:
    lines = [
        {
            "schema": {"enum": ["yes", "no"]},
            "tests": [{"data": "maybe", "valid": False}, {"data": "no", "valid": True}],
        },
        {"schema": {}, "tests": []},
    ]
    schemas, found = tmp_path / "schemas.jsonl", tmp_path / "found.json"
    schemas.write_text("\n".join(map(json.dumps, lines)))
    words = ("--schemas", str(schemas), "--vocabulary", "1", "--rows", "1", "--output-json", str(found))
    assert masks.run(parsed(*words)) == 0
    figures = json.loads(found.read_text())
    assert figures["schemas"] == figures["followed"] == 1, "the one that has a valid instance"
    assert figures["first_ms"]["median"] > 0 and figures["spread"][0]["steps"] > 1


@pytest.mark.parametrize("written", [None, "no json", '{"schema": {}}', '{"schema": {}, "tests": [1]}', "[]"])
def test_a_file_that_holds_no_schemas_is_named(written: str | None, tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    if written is not None:
        path.write_text(written)
    with pytest.raises(ConfigError, match=r"schemas\.jsonl cannot be read"):
        masks.run(parsed("--schemas", str(path), "--vocabulary", "1"))


def test_a_file_without_instances_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match="none of the schemas can be followed"):
        masks.run(parsed("--schemas", str(path), "--vocabulary", "1"))


def test_counts_are_whole_numbers_from_1_on() -> None:
    assert [count(text) for text in ("1", "64", "007")] == [1, 64, 7]
    for text in ("0", "-1", "1.5", "", "many", "٣", "1e3", " 1"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a whole number of at least 1"):
            count(text)


def test_files_to_write_are_looked_at_before_anything_is_measured(tmp_path: Path) -> None:
    assert output(str(tmp_path / "run.json")) == tmp_path / "run.json" and not (tmp_path / "run.json").exists()
    assert picture(str(tmp_path / "run.SVG")) == tmp_path / "run.SVG"
    for name, said in ((".", "is a folder"), ("no/run.json", "there is no folder"), ("x.txt", "not an image")):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            picture(str(tmp_path / name))


def test_numbers_that_cannot_be_meant_are_said() -> None:
    assert (natural("0"), natural("3"), share("0"), share("1"), positive("0.5")) == (0, 3, 0.0, 1.0, 0.5)
    for kind, text in (
        (natural, "-1"),
        (share, "7"),
        (share, "nan"),
        (share, "much"),
        (positive, "0"),
        (positive, "inf"),
    ):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)
