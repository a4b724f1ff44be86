"""Orders of service.

To add one: a file with a subclass of Policy or DynamicPolicy (protocol.py), and a line in ``POLICIES``.

What lives here: the register. What may not: what a policy is (protocol.py), budgets, blocks, rows (step_planner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from headrace.config import SchedulerConfig
from headrace.cost.cost_model import Forecast
from headrace.errors import ConfigError
from headrace.scheduler.policies.deadline import Deadline
from headrace.scheduler.policies.fair import Fair
from headrace.scheduler.policies.protocol import DynamicPolicy, Order, Policy, Priority, Refusal
from headrace.scheduler.policies.qoe import QualityOfExperience
from headrace.scheduler.policies.shortest_remaining import History, MaxTokens, ShortestRemaining

Create = Callable[[SchedulerConfig, Forecast | None], Policy]

POLICIES: Mapping[str, Create] = MappingProxyType(
    {
        "fcfs": lambda config, forecast: Policy(),
        "priority": lambda config, forecast: Priority(),
        "deadline": lambda config, forecast: Deadline(
            config.ttft_target_ms / 1e3, config.tpot_target_ms / 1e3, forecast
        ),
        "fair": lambda config, forecast: Fair(config.tenant_weights, config.fair_input_price, config.fair_output_price),
        "qoe": lambda config, forecast: QualityOfExperience(
            config.expected_ttft, config.reading_speed, config.qoe_preemptions
        ),
        "shortest-remaining": lambda config, forecast: ShortestRemaining(
            History() if config.length_prediction == "history" else MaxTokens(), config.ageing
        ),
    }
)


def create_policy(config: SchedulerConfig, forecast: Forecast | None = None) -> Policy:
    name = config.scheduling_policy
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy is {name!r}; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name](config, forecast)


__all__ = ["POLICIES", "DynamicPolicy", "Forecast", "Order", "Policy", "Refusal", "create_policy"]
