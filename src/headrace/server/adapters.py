"""Adapters of the running server: their names, and the two routes by which an operator changes them.

What lives here: who may, and which folders. What may not: adapters themselves (the engine's).
"""

from __future__ import annotations

from pathlib import Path

from headrace.config import check_adapter_name
from headrace.errors import ConfigError, InvalidRequest, NotFound
from headrace.server.dialects.body import Body, Label
from headrace.server.exchange import Exchange
from headrace.server.limits import sees_all
from headrace.server.service import Service


class LoadAdapterBody(Body, kw_only=True):
    lora_name: Label
    lora_path: Label
    load_inplace: bool = False


class UnloadAdapterBody(Body, kw_only=True):
    lora_name: Label
    lora_int_id: int | None = None


async def names(service: Service) -> list[str]:
    engine = service.model.found
    known = engine is not None and engine.alive and service.model.engine_config.adapters.enable_lora
    return await engine.adapters() if engine is not None and known else []


async def load(service: Service, exchange: Exchange) -> None:
    body = await service.limits.bodies.read(exchange, LoadAdapterBody.read)
    _check_allowed(service, exchange)
    name = _name(body.lora_name)
    if name in service.model.any_engine.info.served_names:
        raise InvalidRequest(f"{name!r} is the model's own name; give the adapter another.", param="lora_name")
    folder = str(_folder(service, body.lora_path))
    await service.model.engine.load_adapter(name, folder, in_place=body.load_inplace)
    await exchange.reply_json({"status": "ok"})


async def unload(service: Service, exchange: Exchange) -> None:
    body = await service.limits.bodies.read(exchange, UnloadAdapterBody.read)
    _check_allowed(service, exchange)
    await service.model.engine.unload_adapter(_name(body.lora_name))
    await exchange.reply_json({"status": "ok"})


def _check_allowed(service: Service, exchange: Exchange) -> None:
    """Whoever may load folders learns which there are: that is an operator's."""
    if not (service.config.allow_runtime_lora_updating and sees_all(service.config, exchange.key_name)):
        raise NotFound("Adapters are not changed by requests here; start with --allow-runtime-lora-updating, and ask with an operator's key.",
                       code="route_not_found")  # fmt: skip


def _name(name: str) -> str:
    try:
        return check_adapter_name(name)
    except ConfigError as error:
        raise InvalidRequest(error.message, param="lora_name") from error


def _folder(service: Service, path: str) -> Path:
    """Within --lora-dir, where that is given."""
    if "\0" in path:
        raise InvalidRequest("lora_path holds a zero byte; give a folder's path.", param="lora_path")
    folder, parent = Path(path), service.model.engine_config.adapters.lora_dir
    if parent is not None and not (Path(parent) / folder).resolve().is_relative_to(Path(parent).resolve()):
        raise InvalidRequest("lora_path lies outside of --lora-dir; move the adapter there.", param="lora_path")
    return folder if parent is None else (Path(parent) / folder).resolve()
