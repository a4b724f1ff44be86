"""``headrace serve --models FILE``: several models from one YAML file.

    memory: 40GiB                 # what all of them may hold together; default: what is free
    sleep-level: 1                # default: 1 on a GPU, 2 on a CPU
    models:
      chat:                       # the name that requests give
        model: org/chat-model     # then the keys that --config has
        max-model-len: 8k
      small:
        model: org/small-model

Flags on the command line hold for every model that does not say otherwise itself.

What lives here: the file's reading. What may not: the models' life (server/members/).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headrace import config
from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.flags import CommandParser, add_config_flags, engine_config, near_match, parse_size, read_yaml_mapping
from headrace.server.members.life import MembersConfig
from headrace.server.members.manager import MemberConfig

KEYS = ("memory", "sleep-level", "models")
# of the server's settings: what each model has for itself
OWN = frozenset(("tool_call_parser", "reasoning_parser", "repetition_detection", "max_queue"))
_MOST_KV = 4 * 2**30  # bytes for each model that does not say, and no more than a quarter of the budget
_CARD_SHARE = 0.9


def read_models(path: Path, args: argparse.Namespace, server: ServerConfig) -> MembersConfig:
    """Raises ConfigError; ends the process, as the parser does, where an entry is not one of --config's."""
    content = {str(key).replace("_", "-"): value for key, value in read_yaml_mapping(path).items()}
    for key in content:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}{near_match(key, KEYS)}; it has {', '.join(KEYS)}.")
    entries, level = content.get("models"), content.get("sleep-level")
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError(f"{path} names no models; write models: and under it NAME: with the keys of --config.")
    if level not in (None, 1, 2) or isinstance(level, bool):
        raise ConfigError(f"{path}: sleep-level is {level!r}; give 1 or 2.")
    shared = {name: value for name, value in vars(args).items() if name in _engine_fields()}
    members = [_read_member(path, name, entry, shared, server) for name, entry in entries.items()]
    _check_names(path, members)
    budget = _read_memory(path, content.get("memory"), members[0].engine.device.device)
    return MembersConfig(tuple(_with_cache(each, budget) for each in members), budget, level)


def _engine_fields() -> frozenset[str]:
    return frozenset(each.name for part in config.ENGINE_PARTS.values() for each in fields(part)) | {"technique"}


def _read_member(path: Path, name: Any, entry: Any, shared: Mapping[str, Any], server: ServerConfig) -> MemberConfig:
    where = f"{path}: models: {name}"
    if not isinstance(name, str) or not 0 < len(name) <= 128 or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{path}: a model is called {str(name)[:80]!r}; give 1 to 128 printable characters (in quotes, if need be)."
        )
    if not isinstance(entry, Mapping | None):
        raise ConfigError(f"{where} is {str(entry)[:80]!r}; write `key: value` lines under it, such as model: FOLDER.")
    parser = CommandParser(prog="headrace serve")
    add_config_flags(parser, EngineConfig, ServerConfig)
    own = vars(parser.parse_args(parser.words_of(where, entry or {})))
    wrong = next((key for key in own if key not in OWN and key in {each.name for each in fields(ServerConfig)}), None)
    if wrong is not None:
        raise ConfigError(
            f"{where}: {wrong} is the whole server's; give --{wrong.replace('_', '-')} on the command line."
        )
    own["technique"] = [*shared.get("technique", ()), *(own.get("technique") or ())]
    engine = engine_config(argparse.Namespace(**{**shared, **own}))
    if engine.model.model is None and "model" not in own:
        raise ConfigError(f"{where} has no model; give model: and a folder, a .gguf file or a hub id.")
    engine = replace(
        engine,
        # a widened copy would be others' memory
        device=replace(engine.device, enable_sleep_mode=True, wide_copy=bool(engine.device.wide_copy)),
        model=replace(engine.model, served_model_name=tuple(dict.fromkeys((name, *engine.model.served_model_name)))),
    )
    return MemberConfig(name, engine, replace(server, **{key: own[key] for key in OWN if key in own}))


def _check_names(path: Path, members: list[MemberConfig]) -> None:
    seen: dict[str, str] = {}
    for member in members:
        for name in member.names:
            if name in seen:
                raise ConfigError(
                    f"{path}: {name!r} is a name of {seen[name]} and of {member.name}; give each model names of its own."
                )
            seen[name] = member.name


def _read_memory(path: Path, value: Any, device: str) -> int:
    if value is None:
        return _free_memory(device)
    try:
        found = parse_size(str(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{path}: memory: {error}.") from None
    if found <= 0 or isinstance(value, bool):
        raise ConfigError(f"{path}: memory is {value}; give a size above 0, like 20GiB.")
    return found


def _free_memory(device: str) -> int:
    """Of the first card, unless the CPU is asked for or there is no card."""
    from headrace.worker.driver import ask_driver
    from headrace.worker.host import available_memory

    driver = ask_driver() if device != "cpu" else None
    return int(driver.cards[0].free * _CARD_SHARE) if driver is not None and driver.cards else available_memory()


def _with_cache(member: MemberConfig, budget: int) -> MemberConfig:
    """No model's KV cache takes all that is free, which is the other models' memory, too."""
    cache = member.engine.cache
    if cache.kv_cache_memory is not None or cache.num_blocks is not None:
        return member
    cache = replace(cache, kv_cache_memory=min(_MOST_KV, max(1, budget // 4)))
    return replace(member, engine=replace(member.engine, cache=cache))
