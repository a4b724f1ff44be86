"""The Grafana board in deploy/, as the tests read it.

What lives here: its queries and the names in them, and the part of /metrics that steps are in. What may not: assertions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.request import Given
from headrace.server.exposition import Lines

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
# Only where the device counts its energy.
COUNTED_BY_SOME = {"headrace_energy_joules_total", "headrace_energy_seconds_total"}

_NAME = re.compile(r"\b(?:vllm:|headrace_|http_|process_)\w+")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "grafana" / "headrace.json").read_text())["panels"]
    return found


def queries() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel.get("targets", ()))


def names() -> set[str]:
    """Of all series that the board reads."""
    return {name for query in queries() for name in _NAME.findall(query)}


def filled_in(query: str, window: str) -> str:
    """With Grafana's variables as they are when all is shown."""
    return query.replace("$__rate_interval", window).replace("$model_name", ".*").replace("$instance", ".*")


def steps_page(summary: Given) -> str:
    """What /metrics says of these steps."""
    page = Lines()
    page.add_steps(summary)
    return str(page)
