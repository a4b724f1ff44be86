"""``headrace serve``: the OpenAI HTTP API over an engine in its own process.

What lives here: flags to configs, and the engine's start. What may not: the server itself (server/).
"""

from __future__ import annotations

import argparse
import sys
import time

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.flags import add_config_flags, add_model_argument, engine_config, server_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig, ServerConfig)


def run(args: argparse.Namespace) -> int:
    """Exit status 2 for flags that cannot be honored, as for flags that do not exist."""
    began = time.time()
    try:
        engine, server = engine_config(args), server_config(args)
        return _serve(engine, server, began)
    except ConfigError as error:
        print(f"headrace: {' '.join(error.message.split())}", file=sys.stderr)
        return 2


def _serve(engine: EngineConfig, server: ServerConfig, began: float) -> int:
    from headrace import __version__
    from headrace.engine.client import AsyncLLM
    from headrace.server.run import run_server

    return run_server(engine, server, __version__, lambda: AsyncLLM.start(engine), began=began)
