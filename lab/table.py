"""``python -m lab table``: one command makes the table of a device, each model in a process of its own.

What lives here: which models and rows, the child processes, what is written. What may not: measuring (table_run.py,
table_measure.py), rows (table_rows.py), peers (table_peers.py), earlier runs (table_merge.py), rendering
(table_show.py).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.bench.arguments import output
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, say, write_json, write_text
from lab.jobs import config_for, flags_of, known_shapes, run_child
from lab.table_measure import Measured
from lab.table_merge import combine, read_files
from lab.table_peers import Peer, load_peer
from lab.table_rows import Row, select_rows
from lab.table_show import markdown, terminal
from lab.table_start import measure_starts
from lab.table_techniques import chosen_techniques, measure_techniques

REPEATS = 3
MARK = "<!-- What follows is written by `python -m lab table --markdown`. -->"  # what stands above it in the file stays


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(known_shapes())
    parser.add_argument(
        "--model",
        nargs="+",
        metavar="PATH",
        help=f"folders with a config.json, or of these shapes: {known} (default: all of these)",
    )
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="ROW", help="rows, or the word before their hyphen (default: all)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=REPEATS,
        help=f"timed repeats of a row, each with ids of its own (default: {REPEATS})",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiplies requests and lengths: to try it out, comparable with nothing",
    )
    parser.add_argument(
        "--techniques",
        nargs="*",
        metavar="NAME",
        help="techniques on and off, too (without a name: all that need a GPU)",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="show earlier --output-json files of this command and of bench ablate too",
    )
    parser.add_argument(
        "--markdown",
        type=output,
        metavar="FILE",
        help="write the tables as markdown, below its mark in a file that has one",
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the engine, behind --")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Exit status 1 where a row that was asked for has no figure."""
    rows, earlier = select_rows(args.rows), read_files(args.merge)
    techniques = chosen_techniques(args.techniques) if args.techniques is not None else []
    _check(args)
    chosen = [] if args.merge and not args.model else args.model or known_shapes()
    models, peer, failed = earlier, load_peer(), False
    print("\n\n".join(terminal(model, peer) for model in models), end="\n\n" if models else "")
    _write(args, models, peer)
    for name in chosen:
        measured = measure_model(name, config, args.flags, rows, techniques, scale=args.scale, repeats=args.repeats)
        failed = failed or any(row["problem"] for row in measured["rows"])
        models = combine([*models, measured])
        print(terminal(next(each for each in models if each["name"] == measured["name"]), peer), flush=True)
        _write(args, models, peer)  # after each, so that what was measured is kept whatever happens later
    return int(failed)


def _write(args: argparse.Namespace, models: Sequence[Mapping[str, Any]], peer: Peer) -> None:
    if args.output_json:
        write_json(
            args.output_json,
            {"facts": machine_facts("measured for each model"), "peer": asdict(peer), "models": models},
        )
    if args.markdown:
        write_text(args.markdown, _kept(args.markdown) + "\n".join(markdown(model, peer) for model in models))


def _kept(path: Path) -> str:
    """What somebody wrote above the mark; a new file has neither."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return f"{text.partition(MARK)[0]}{MARK}\n\n" if MARK in text else ""


def _check(args: argparse.Namespace) -> None:
    if args.repeats < 1 or not 0.0 < args.scale <= 1.0:
        raise ConfigError(
            f"--repeats is {args.repeats} and --scale {args.scale:g}; give at least 1 repeat and a scale above 0 and up to 1."
        )


def measure_model(
    name: str,
    config: EngineConfig,
    flags: Sequence[str],
    rows: Sequence[Row],
    techniques: Sequence[str] = (),
    *,
    scale: float,
    repeats: int,
) -> dict[str, Any]:
    """Every row of one model: the start first, from outside, the others by a child process, then ``techniques`` on and
    off, each in one of its own. ``flags`` are those ``config`` was made from."""
    say(f"{name}: {' '.join(row.name for row in rows)}")
    config = config_for(name, config)
    starts, stages = measure_starts([row for row in rows if row.group == "start"], flags_of(config, flags), repeats)
    others = [row for row in rows if row.group != "start"]
    result: dict[str, Any] = (
        _rows_of(config, others, scale, repeats) if others else {"facts": machine_facts(), "rows": []}
    )
    result["rows"] += [asdict(measured) for measured in starts]
    result |= {"start_stages": stages} if stages else {}
    result |= {"techniques": measure_techniques(techniques, flags_of(config, flags))} if techniques else {}
    command = _command(name, rows, techniques, scale, repeats, flags)
    return {"name": Path(name).name, "command": command, "scale": scale, "repeats": repeats, **result}


def _command(
    model: str, rows: Sequence[Row], techniques: Sequence[str], scale: float, repeats: int, flags: Sequence[str]
) -> str:
    """What makes these figures again."""
    some = ["--rows", *(row.name for row in rows)] if len(rows) < len(select_rows([])) else []
    unusual = [
        *(["--scale", f"{scale:g}"] if scale != 1 else []),
        *(["--repeats", str(repeats)] if repeats != REPEATS else []),
    ]
    unusual += (
        ["--techniques", *(techniques if list(techniques) != chosen_techniques([]) else [])] if techniques else []
    )
    return shlex.join(
        ["python", "-m", "lab", "table", "--model", model, *some, *unusual, *(["--", *flags] if flags else [])]
    )


def _rows_of(config: EngineConfig, rows: Sequence[Row], scale: float, repeats: int) -> dict[str, Any]:
    """What the child measured; rows it did not come to have a problem."""
    found, status = run_child(
        "lab.table_run", config, {"rows": [row.name for row in rows], "scale": scale, "repeats": repeats}
    )
    found = {"facts": machine_facts(), "rows": [], **found}
    done = {row["row"] for row in found["rows"]}
    lost = f"its process ended with status {status} before this row; what it said is above"
    found["rows"] += [asdict(Measured(row.name, row.unit, problem=lost)) for row in rows if row.name not in done]
    return found
