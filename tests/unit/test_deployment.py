"""The Dockerfile, the systemd unit, the example of a config file and the monitoring stack, held against the code and
the README: what they name exists."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import flags
from headrace.commands import serve
from headrace.config import ServerConfig
from headrace.server.app import ROUTES
from tests.support import board
from tests.support.board import MONITORING

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "Dockerfile").exists(), reason="not a checkout of the repository")


def server_config(words: list[str]) -> ServerConfig:
    """As ``headrace serve`` reads these words; wrong ones end the test."""
    parser = flags.CommandParser(prog="headrace serve")
    serve.add_arguments(parser)
    args = parser.parse_args(words)
    flags.engine_config(args)
    return flags.server_config(args)


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def argument(name: str) -> str:
    return [text for kind, text in instructions() if kind == name][-1]


def in_context(path: str) -> bool:
    """By .dockerignore: the last pattern that matches decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if (
            line
            and not line.startswith("#")
            and any(
                fnmatch.fnmatch(part, pattern.removeprefix("**/"))
                for part in (path, path.split("/")[0], path.split("/")[-1])
            )
        ):
            kept = line.startswith("!")
    return kept


def test_the_entry_point_is_a_command_of_ours() -> None:
    command, sub_command, *words = json.loads(argument("ENTRYPOINT"))
    config = server_config([*words, "org/name", "--api-key", "k"])
    assert (command, sub_command) == ("headrace", "serve") and config.host == "0.0.0.0"
    assert config.port == ServerConfig().port == int(argument("EXPOSE")) and argument("STOPSIGNAL") == "SIGTERM"


def test_the_health_check_asks_an_open_route() -> None:
    path = re.search(r"http://127\.0\.0\.1:8000(/\w+)", argument("HEALTHCHECK"))
    assert path is not None and path[1] in {route.path for route in ROUTES if route.open}


def test_the_image_is_built_from_what_ci_tests_by_nobody_special() -> None:
    runs = [text for kind, text in instructions() if kind == "RUN"]
    installs = [text for text in runs if "pip install" in text]
    assert installs and all("-c /tmp/constraints.txt" in text for text in installs)
    assert argument("USER") not in ("root", "0") and not any(
        "KEY" in text for kind, text in instructions() if kind in ("ENV", "ARG")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(text.endswith('[hf]" && rm -rf /wheels') for text in runs) and "hf" in project["optional-dependencies"]
    python = re.search(r"PYTHON=(\d+)\.(\d+)", (ROOT / "Dockerfile").read_text())
    assert python is not None and f">={python[1]}.{python[2]}" == project["requires-python"]


def test_the_context_holds_what_the_build_needs_and_little_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = ["pyproject.toml", "constraints.txt", project["readme"], "LICENSE", "NOTICE", "src/headrace/cli.py"]
    assert all(in_context(path) and (ROOT / path).exists() for path in needed)
    assert not any(
        in_context(path)
        for path in (".git/config", "tests/conftest.py", ".venv/bin/python", "src/headrace/native.so", "secrets.env")
    )


def test_the_readme_says_the_same_commands() -> None:
    for page in ("README.md", "docs/operating.md"):
        commands = [shlex.split(line) for line in (ROOT / page).read_text().splitlines() if line.startswith("docker ")]
        build, run = commands
        assert (
            build == ["docker", "build", "-t", "headrace", "."]
            and run[:2] == ["docker", "run"]
            and run[-1] == "headrace"
        )
        assert run[run.index("-p") + 1].endswith(f":{argument('EXPOSE')}") and run[run.index("-e") + 1].startswith(
            "HEADRACE_API_KEY="
        )
        volumes = [run[place + 1].split(":")[1] for place, word in enumerate(run) if word == "-v"]
        assert all(f"={volume}" in argument("ENV") for volume in volumes)


def test_the_example_of_a_config_file_can_be_read() -> None:
    config = server_config(["--config", str(ROOT / "deploy" / "serve.yaml")])
    assert config.supervise and config.log_format == "json" and config.host == "127.0.0.1"


def test_what_the_example_leaves_out_can_be_taken_in(tmp_path: Path) -> None:
    """Every line that is commented out is one that could stand there."""
    text = re.sub(r"(?m)^# (?=[\w-]+: )", "", (ROOT / "deploy" / "serve.yaml").read_text())
    (tmp_path / "serve.yaml").write_text(text)
    config = server_config(["--config", str(tmp_path / "serve.yaml")])
    assert config.ssl_certfile and config.ssl_keyfile and config.allowed_origins == ("https://chat.example",)


def test_the_unit_starts_a_command_of_ours_and_is_patient_enough() -> None:
    lines = (ROOT / "deploy" / "headrace.service").read_text().splitlines()
    unit: dict[str, Any] = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    program, command, *words = shlex.split(unit["ExecStart"])
    words[words.index("--config") + 1] = str(ROOT / "deploy" / "serve.yaml")
    config = server_config(words)
    assert program.endswith("/bin/headrace") and command == "serve" and not config.supervise
    assert float(unit["TimeoutStopSec"]) > config.shutdown_timeout + 5 and unit["RestartPreventExitStatus"] == "2"


def read(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def test_the_stack_names_what_is_there() -> None:
    stack = read("compose.yaml")
    services = stack["services"]
    known = {
        "build", "image", "command", "environment", "ports", "volumes", "secrets", "depends_on", "restart", "stop_grace_period"
    }  # fmt: skip
    for service in services.values():
        assert set(service) <= known and (
            ":" in service["image"] or (MONITORING / service["build"] / "Dockerfile").exists()
        )
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "on this machine alone"
        for source, *_ in (volume.split(":") for volume in service.get("volumes", ())):
            assert (MONITORING / source).is_file() if source.startswith(".") else source in stack["volumes"]
        assert set(service.get("secrets", ())) <= set(stack["secrets"]) and set(service.get("depends_on", ())) <= set(
            services
        )
    server = services["headrace"]
    server_config([*json.loads(argument("ENTRYPOINT"))[2:], *server["command"], "--api-key", "k"])
    assert int(server["stop_grace_period"].removesuffix("s")) > ServerConfig().shutdown_timeout + 5
    assert {volume.split(":")[1] for volume in server["volumes"]} == {"/cache", "/models"}
    asked = set(re.findall(r"\$\{(\w+):\?", (MONITORING / "compose.yaml").read_text()))
    assert asked == {"HEADRACE_API_KEY", "GRAFANA_PASSWORD"}, "nothing secret has a default"


def test_prometheus_finds_the_server_and_grafana_finds_prometheus_and_the_board() -> None:
    stack = read("compose.yaml")
    (job,) = read("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"headrace:{argument('EXPOSE')}"]}] and "metrics_path" not in job
    (secret,) = stack["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert stack["secrets"][secret] == {"environment": "HEADRACE_API_KEY"}
    (source,), (provider,) = read("grafana/datasource.yaml")["datasources"], read("grafana/boards.yaml")["providers"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    mounted = dict(
        volume.removesuffix(":ro").split(":")
        for volume in stack["services"]["grafana"]["volumes"]
        if volume.startswith(".")
    )
    assert Path(mounted["./grafana/headrace.json"]).parent == Path(provider["options"]["path"])
    assert Path(mounted["./grafana/datasource.yaml"]).parent == Path("/etc/grafana/provisioning/datasources")
    assert Path(mounted["./grafana/boards.yaml"]).parent == Path("/etc/grafana/provisioning/dashboards")


def test_the_board_is_well_formed() -> None:
    whole = json.loads((MONITORING / "grafana" / "headrace.json").read_text())
    variables = {each["name"] for each in whole["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in board.panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24 and panel["title"]
        taken |= cells
        assert (panel["type"] == "row") == (not panel.get("targets"))
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len({*refs}) == len(refs)
    assert len({panel["id"] for panel in board.panels()}) == len(board.panels())
    for query in board.queries():
        assert (
            query.count("(") == query.count(")") and query.count("{") == query.count("}") and query.count('"') % 2 == 0
        ), query
        assert set(re.findall(r"\$(\w+)", query)) <= variables | {"__rate_interval"}, query
    assert (
        '"uid": "${datasource}"' in (MONITORING / "grafana" / "headrace.json").read_text() and "datasource" in variables
    )
