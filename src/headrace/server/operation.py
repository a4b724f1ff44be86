"""Routes for whoever runs the server: its load and settings, a probe under another name, forgetting cached prefixes.

What lives here: these handlers. What may not: generation (generate.py), metrics (exposition.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from headrace.config import ServerConfig
from headrace.server.exchange import Exchange
from headrace.server.service import Service


async def ping(service: Service, exchange: Exchange) -> None:
    """As /health; the answer has no body, as the platforms that ask this want it."""
    service.any_engine()
    await exchange.reply(200, b"", b"text/plain")


async def load(service: Service, exchange: Exchange) -> None:
    """Requests that wait or run, with all front ends; prompts of one request count one by one."""
    await exchange.reply_json({"server_load": service.ledger.live})


async def server_info(service: Service, exchange: Exchange) -> None:
    """What was asked for, and what was chosen where nothing was."""
    info, config = service.any_engine().info, service.engine_config
    await exchange.reply_json(
        {
            "version": service.version,
            "config": {**_plain(config), "server": _without_secrets(service.config)},
            "decisions": [_plain(decision) for decision in (*info.decisions, *service.decisions)],
            "engine": _plain(replace(info, decisions=())),
        }
    )


async def reset_prefix_cache(service: Service, exchange: Exchange) -> None:
    await service.engine.reset_prefix_cache()
    await exchange.reply_json({"status": "ok"})


def _without_secrets(config: ServerConfig) -> dict[str, Any]:
    """Of keys only how many there are."""
    return {**_plain(config), "api_key": f"{len(config.api_key)} set"}


def _plain(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(record, enc_hook=str)
    return found
