"""Who is a tenant to policies that share out: a key by its place among --api-key, or the user that a request names.

What lives here: that name, whose places of the queue a request takes, whose requests a key may see, and whether settings name anybody.
What may not: checking keys (auth.py), sharing (scheduler/policies/fair.py, ledger.py).
"""

from __future__ import annotations

import zlib

from headrace.config import SchedulerConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.server.ledger import CELLS

_KEY = "key"


def key_name(number: int) -> str:
    """Of the key that is number ``number``, from 1: it tells nothing of the key."""
    return f"{_KEY}{number}"


def are_keys(config: ServerConfig) -> bool:
    return config.tenant_by == "key" or (config.tenant_by == "auto" and len(config.api_key) > 1)


def tenant_of(config: ServerConfig, key: str, user: str) -> str:
    """``key``: the name of the one that was sent. Users of several keys are told apart by key: nobody takes another key's share."""
    if are_keys(config):
        return key
    return f"{key}/{user}" if len(config.api_key) > 1 else user


def cell_of(config: ServerConfig, key: str, user: str) -> int | None:
    """Whose places of the queue a request takes; None where all clients are one. Anybody may call itself many users, so they are told apart
    only where the operator says that users are the tenants, and never within a key among others."""
    if len(config.api_key) > 1:
        return int(key.removeprefix(_KEY)) % CELLS
    return zlib.crc32(user.encode("utf-8", "surrogatepass")) % CELLS if config.tenant_by == "user" else None


def sees_all(config: ServerConfig, key: str) -> bool:
    """An operator's key, or there are no others."""
    return len(config.api_key) <= 1 or key in config.operator_key


def is_own(tenant: str, key: str) -> bool:
    """``tenant``: as tenant_of named it, where there are several keys."""
    return tenant.partition("/")[0] == key


def check_operators(config: ServerConfig) -> None:
    """Raises ConfigError for an operator that is no key."""
    keys = _key_names(config)
    unknown = next((name for name in config.operator_key if name not in keys), None)
    if unknown is not None:
        known = f"{keys[0]} to {keys[-1]} in the order of --api-key" if keys else "none is set"
        raise ConfigError(f"operator_key names {unknown[:80]!r}, which is no key ({known}); name one, never the key itself.")


def _key_names(config: ServerConfig) -> list[str]:
    return [key_name(number) for number in range(1, len(config.api_key) + 1)]


def check_weights(scheduler: SchedulerConfig, config: ServerConfig) -> None:
    """Raises ConfigError for weights that would change nothing."""
    names = list(scheduler.tenant_weights)
    if names and scheduler.scheduling_policy != "fair":
        raise ConfigError(
            f"tenant_weight is given, but --scheduling-policy is {scheduler.scheduling_policy}, which knows no shares; add --scheduling-policy fair."
        )
    keys = _key_names(config)
    unknown = next((name for name in names if are_keys(config) and name not in keys), None)
    if unknown is not None:
        known = f"{keys[0]} to {keys[-1]} in the order of --api-key" if keys else "none is set"
        raise ConfigError(f"tenant_weight names {unknown[:80]!r}, but tenants are API keys here ({known}); name one, or add --tenant-by user.")
