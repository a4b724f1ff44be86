"""``headrace models``: lists the hub's cache, fetches into it, removes from it.

What lives here: printing, and asking before something is removed. What may not: the cache's layout
(models/hub_cache.py), choosing files (models/hub.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from headrace.bench.arguments import declare
from headrace.errors import ConfigError, ModelError
from headrace.flags import near_match
from headrace.models.hub import HubId, download_model
from headrace.models.hub_cache import cached_models, hub_cache, remove_cached
from headrace.observe.progress import format_bytes
from headrace.observe.report import table

ACTIONS = {
    "list": "List the cache's contents and sizes.",
    "pull": "Download a model from the hub to the cache.",
    "remove": "Remove models from the cache, with all revisions.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", title="actions (without one: list)", dest="action")
    for name, text in ACTIONS.items():
        action = actions.add_parser(
            name, help=text[0].lower() + text[1:].partition(",")[0].rstrip("."), description=text
        )
        declare(action, f"models.{name}")


def run(args: argparse.Namespace) -> int:
    if args.action == "pull":
        return _pull(args.model)
    if args.action == "remove":
        return _remove(args.models, ask=not args.yes)
    return _list(as_json=getattr(args, "json", False))


def _list(*, as_json: bool) -> int:
    found = cached_models()
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1, default=str))
        return 0
    if not found:
        print(
            f"No model is in {hub_cache()}. Fetch one: headrace models pull org/name. The bundled demo model is part of the package."
        )
        return 0
    rows = [[each.name, each.format, ", ".join(each.revisions), format_bytes(each.bytes)] for each in found]
    print(table(("model", "format", "revision", "size"), rows))
    print(
        f"\n{format_bytes(sum(each.bytes for each in found))} in {hub_cache()}; headrace models remove NAME frees the space of one."
    )
    return 0


def _pull(text: str) -> int:
    model = HubId.parse(text)
    if model is None:
        raise ConfigError(f"{text!r} is not a hub id; write org/name, org/name@revision or org/name:Q4_K_M.")
    path = download_model(model, with_weights=True)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    print(
        f"{model}: {format_bytes(sum(file.stat().st_size for file in files))} in {path}. Try: headrace chat --model {model}"
    )
    return 0


def _remove(names: list[str], *, ask: bool) -> int:
    """All or nothing: if one name is not there, or the answer is not yes, nothing is removed."""
    found = {each.name: each for each in cached_models()}
    for name in names:
        if name not in found:
            raise ModelError(f"{name!r} is not in {hub_cache()}{_hint(name, found)}")
    chosen = [found[name] for name in dict.fromkeys(names)]
    what = f"{', '.join(each.name for each in chosen)} ({format_bytes(sum(each.bytes for each in chosen))})"
    if ask and not _agreed(f"Remove {what}?"):
        print("Nothing was removed.")
        return 1
    for each in chosen:
        remove_cached(each)
    print(f"Removed {what}.")
    return 0


def _hint(name: str, found: Iterable[str]) -> str:
    hub_id = HubId.parse(name)
    if hub_id is not None and hub_id.repository in found:
        return f"; models are removed whole: headrace models remove {hub_id.repository}."
    return f"{near_match(name, found) or '.'} `headrace models` lists what is."


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to confirm on; give --yes.")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
