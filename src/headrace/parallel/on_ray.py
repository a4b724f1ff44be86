"""Ranks as actors of a Ray cluster, ``--distributed-executor-backend ray``: each in a bundle of one placement group,
wherever Ray finds a device for it.

An actor is a node of one rank (node.py), which knocks at the first rank's port as those of other hosts do; Ray only
starts and ends them. The first rank is no actor: one holds its bundle, on this host, and says which GPU that is.

What lives here: that. What may not: how ranks meet (rendezvous.py), a cluster of our own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from headrace.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.parallel.node import Node
from headrace.parallel.rendezvous import Place

_PLACE_SECONDS = 30.0
_MOST_SAID = 500  # characters
_SEEN = "CUDA_VISIBLE_DEVICES"


def _uses_gpus() -> bool:
    """From then on CUDA_VISIBLE_DEVICES changes nothing here."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


class Actors:
    """Those of all ranks. Raises ConfigError where Ray, or room in its cluster, is missing."""

    _sees: ClassVar[str | None] = None  # the GPU that an earlier one's was for, which this process uses since

    def __init__(self, config: EngineConfig) -> None:
        ray = _ray()
        on_term = signal.getsignal(signal.SIGTERM)
        self._connects = not ray.is_initialized()  # whoever calls us may have connected himself
        try:
            if self._connects:
                ray.init(logging_level="warning", include_dashboard=False)
        except Exception as error:
            where = os.environ.get("RAY_ADDRESS", "")
            raise ConfigError(f"Ray cannot be used ({error}). See RAY_ADDRESS={where!r} and `ray status`.") from error
        with suppress(ValueError):  # not the main thread, where Ray has left it alone, too
            signal.signal(signal.SIGTERM, on_term)
        self._config, self._closed = config, False
        self._watcher: threading.Thread | None = None
        self._saw: str | None = None
        self._ray, self.address = ray, str(ray.util.get_node_ip_address())
        size, kind = config.device.num_ranks, _kind(config.device.device, ray)
        bundles = [{"CPU": 1.0} | ({"GPU": 1.0} if kind == "GPU" else {}) for _ in range(size)]
        bundles[0][f"node:{self.address}"] = 0.001
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(_PLACE_SECONDS):
            free = ray.available_resources().get(kind, 0)
            self.close()
            raise ConfigError(
                f"Ray found no place for {size} ranks with a {kind} each, one of them on this host ({self.address}), within "
                f"{_PLACE_SECONDS:g} s; {free:g} {kind}s are free. Give fewer, or add nodes to the cluster."
            )
        self._actors = [self._create(at, kind) for at in range(size)]
        if kind == "GPU":
            (gpu,) = ray.get(self._actors[0].gpus.remote())
            self._take(str(gpu))

    def _take(self, gpu: str) -> None:
        """This process sees the GPU of the first bundle alone, until ``close``. Raises ConfigError where it is too late."""
        if _uses_gpus() and (Actors._sees or os.environ.get(_SEEN)) != gpu:
            self.close()
            raise ConfigError(
                f"Ray gives the first rank GPU {gpu}, but this process uses GPUs already. Set {_SEEN}={gpu}, or make the LLM first."
            )
        self._saw, os.environ[_SEEN] = os.environ.get(_SEEN, ""), gpu

    def _create(self, at: int, kind: str) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=at
        )
        actor = self._ray.remote(Actor).options(
            num_cpus=1, num_gpus=int(kind == "GPU"), scheduling_strategy=strategy, max_concurrency=2
        )
        return actor.remote()

    def begin(self, place: Place, model: str, lose: Callable[[str], None]) -> None:
        """All but the first rank's. ``lose``: is told, from a thread, of the first that does not do as it should."""
        runs = {
            actor.run.remote(self._config, place, rank, model): rank for rank, actor in enumerate(self._actors) if rank
        }
        self._watcher = threading.Thread(target=self._watch, args=(runs, lose), name="headrace-actors", daemon=True)
        self._watcher.start()

    def _watch(self, runs: Mapping[Any, int], lose: Callable[[str], None]) -> None:
        left = list(runs)
        while left and not self._closed:
            done, left = self._ray.wait(left, timeout=1.0)
            for each in done:
                try:
                    self._ray.get(each)
                except self._ray.exceptions.RayError as error:
                    lose(f"the actor of rank {runs[each]} failed: {' '.join(str(error).split())[-_MOST_SAID:]}")

    def close(self) -> None:
        self._closed = True
        if self._saw is not None:
            if _uses_gpus():
                Actors._sees = os.environ.get(_SEEN)
            os.environ[_SEEN] = self._saw
            if not self._saw:
                del os.environ[_SEEN]
            self._saw = None
        if self._watcher is not None:  # which would connect again
            self._watcher.join()
        with suppress(Exception):  # a cluster that is gone has nothing left of ours
            self._ray.util.remove_placement_group(self._group)
        if self._connects:
            self._ray.shutdown()


class Actor:
    def gpus(self) -> list[Any]:
        return list(_ray().get_gpu_ids())

    def run(self, config: EngineConfig, place: Place, rank: int, model: str) -> None:
        """What goes wrong is told to the first rank."""
        with suppress(HeadraceError):
            Node(config, place, rank, (rank,), model).run()


def _kind(device: str, ray: Any) -> str:
    """What a bundle holds: as asked, or what the cluster has."""
    return "GPU" if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU")) else "CPU"


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f'--distributed-executor-backend ray needs Ray, which cannot be imported ({error}). Install it: pip install "headrace[ray]".'
        ) from error
    return ray
