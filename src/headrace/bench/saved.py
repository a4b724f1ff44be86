"""Runs that were written by ``--output-json``, read back: every request as its client saw it.

What lives here: reading samples. What may not: figures (statistics.py), comparing (planner/against.py).
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.bench.statistics import Sample
from headrace.errors import ConfigError

_FIELDS = {each.name for each in fields(Sample)}


def read_samples(path: Path) -> list[Sample]:
    """Raises ConfigError."""
    try:
        requests = json.loads(path.read_text(encoding="utf-8"))["requests"]
        return [_sample(request) for request in requests]
    except OSError as error:
        raise ConfigError(f"The run {path} cannot be read ({error.strerror}); give what --output-json wrote.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"The run {path} holds no requests ({error}); give what headrace bench serve --output-json wrote.") from error


def _sample(request: dict[str, Any]) -> Sample:
    sample = Sample(**{name: value for name, value in request.items() if name in _FIELDS})
    sample.arrivals = [float(when) for when in sample.arrivals]
    return sample
