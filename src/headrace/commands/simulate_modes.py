"""What ``headrace simulate`` is asked for: one run, a curve, a calibration or a report; and flags that only some of these heed.

What lives here: which flags go together. What may not: values of single flags, doing any of it.
"""

from __future__ import annotations

import argparse

from headrace.errors import ConfigError

ONE_OF = ("calibrate", "advise", "four_costs", "sweep_rate", "compare")  # none of them: one run
TOGETHER = ({"advise", "four_costs"}, {"sweep_rate", "compare"})
NEEDS = {  # flag: what it is of
    "front_of": ("calibrate",),
    "output_calibration": ("calibrate",),
    "columns": ("sweep_rate", "compare"),
    "host_link": ("four_costs",),
}
AGAINST = {  # flag: what it says nothing to
    "against": ("calibrate", "advise", "four_costs"),
    "plot": ("calibrate", "advise", "four_costs"),
    "output_json": ("calibrate",),
    "calibration": ("calibrate", "assumed_prices"),
    "assumed_prices": ("calibrate",),
    "request_rate": ("sweep_rate",),
}


def check_modes(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that would be ignored."""
    modes = [name for name in ONE_OF if _given(args, name)]
    if len(modes) > 1 and set(modes) not in TOGETHER:
        raise ConfigError(f"{_flag(modes[0])} and {_flag(modes[1])} ask for different things; give one of them.")
    for name, wanted in NEEDS.items():
        if _given(args, name) and not any(_given(args, each) for each in wanted):
            raise ConfigError(f"{_flag(name)} belongs to {' or '.join(map(_flag, wanted))}; give that too, or leave it out.")
    for name, others in AGAINST.items():
        for other in others:
            if _given(args, name) and _given(args, other):
                raise ConfigError(f"{_flag(name)} changes nothing with {_flag(other)}; give one of them.")


def _given(args: argparse.Namespace, name: str) -> bool:
    value = getattr(args, name)
    return value is not None and value is not False and (value != [] or name == "four_costs")  # which may stand without contexts


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
