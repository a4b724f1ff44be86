"""``headrace serve``: the OpenAI HTTP API over an engine in its own process.

What lives here: flags to configs, and the engine's start. What may not: the server itself (server/).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.flags import add_config_flags, add_model_argument, engine_config, server_config
from headrace.observe.logs import tell_processes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig, ServerConfig)
    help_text = "serve several models, which sleep when others need their memory: a YAML file (see docs/many-models.md)"
    parser.add_argument("--models", metavar="FILE", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Exit status 2 for flags that cannot be honored, as for flags that do not exist."""
    began = time.time()
    try:
        if args.models is not None:
            return _serve_models(args, began)
        engine, server = engine_config(args), server_config(args)
        if engine.device.node_rank:
            from headrace.parallel.node import serve_node

            return serve_node(engine, server)
        return _serve(engine, server, began)
    except ConfigError as error:
        print(f"headrace: {' '.join(error.message.split())}", file=sys.stderr)
        return 2


def _serve(engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """One engine's process imports what it needs while this one does."""
    from headrace import __version__
    from headrace.processes.child import begin

    # until the server hears it (lifecycle.py); an exception would be lost where it comes while a module is compiled
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    tell_processes(server.log_format)
    below = engine.device.executor != "model" or _is_below(engine, server)
    begun = None if below else begin("headrace.engine.process", words=(str(os.getpid()),))
    try:
        from headrace.engine.client import AsyncLLM
        from headrace.server.run import run_server

        return run_server(engine, server, __version__, lambda: AsyncLLM.start(engine, begun=begun), began=began)
    finally:
        if begun:
            begun.end()  # where it came to no start


def _is_below(engine: EngineConfig, server: ServerConfig) -> bool:
    """Whether there are several, or others start it."""
    return engine.device.data_parallel_size > 1 or server.supervise or server.api_server_count > 1


def _serve_models(args: argparse.Namespace, began: float) -> int:
    from headrace import __version__
    from headrace.commands.serve_models import read_models
    from headrace.engine.client import AsyncLLM
    from headrace.server.run import run_members

    if args.model_argument is not None:
        raise ConfigError(
            f"MODEL is {args.model_argument!r}, but --models FILE says which models are served; give one of them."
        )
    if engine_config(args).device.nnodes > 1:
        raise ConfigError("--models serves on one host; leave out --nnodes.")
    server = server_config(args)
    members = read_models(Path(args.models), args, server)
    return run_members(members, server, __version__, AsyncLLM.start, began=began)
