"""Two nodes on one host: tokens are those of one rank, and whoever is lost is named and takes all along."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from headrace import LLM, LoRARequest, SamplingParams
from headrace.engine.resolve import create_config, find_source
from headrace.errors import ConfigError, EngineDead, HeadraceError
from headrace.parallel import node
from headrace.parallel.group import GlooGroup, check_members
from headrace.parallel.node import Node
from headrace.parallel.rendezvous import SECRET_VARIABLE, Place
from tests.support import adapters, modes, tiny
from tests.support.serving import ROOT, SERVE, environment, serving, wait_for

SECRET = "a secret of some length"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(20))]
SIZES = {**modes.PLAIN, "num_blocks": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Nodes:
    """All nodes but the first, each in a thread. ``ends``: what each ended with, once it has."""

    def __init__(self, model: str, keywords: dict[str, Any]) -> None:
        config = create_config(model, **keywords)
        device = config.device
        place, each = Place("127.0.0.1", device.master_port, SECRET.encode()), device.ranks_here
        self.ends: dict[int, HeadraceError | None] = {}
        self.nodes = [
            Node(config, place, at, range(at * each, (at + 1) * each), find_source(config).fingerprint)
            for at in range(1, device.nnodes)
        ]
        self._threads = [threading.Thread(target=self._run, args=(node,)) for node in self.nodes]
        for thread in self._threads:
            thread.start()

    def _run(self, node: Node) -> None:
        try:
            node.run()
            self.ends[node.number] = None
        except HeadraceError as error:
            self.ends[node.number] = error

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(10)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: child.pid for node in self.nodes for rank, child in node._children.items()}


@contextmanager
def spread(model: str, nodes: int = 2, **sizes: Any) -> Iterator[tuple[LLM, Nodes]]:
    keywords = {**SIZES, **sizes, "nnodes": nodes, "master_port": free_port()}
    others = Nodes(model, keywords)
    try:
        with LLM(model, **keywords) as llm:
            yield llm, others
    finally:
        others.wait()


def answers(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def alone(model: str) -> list[list[int]]:
    with LLM(model, **SIZES) as llm:
        return answers(llm)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_two_nodes_answer_as_one_rank_and_a_killed_rank_of_the_other_is_named(llama: str) -> None:
    with spread(llama, tensor_parallel_size=2) as (llm, others):
        assert answers(llm) == alone(llama)
        (pid,) = others.pids.values()
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        said = rf"rank 1 of node 1 \(process {pid} on 127.0.0.1\) was ended by signal 9 \(SIGKILL\)"
        with pytest.raises(EngineDead, match=said):
            while True:
                answers(llm)
        others.wait()
        assert time.monotonic() - begun < 5
    assert said.replace("\\", "") in str(others.ends[1]) and gone(pid)


def together(meet: Any) -> None:
    """``meet(group)`` as two ranks, each in a thread."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    threads = [threading.Thread(target=lambda at=at: meet(GlooGroup(store, "127.0.0.1", at, 2))) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


def test_a_member_of_a_group_without_its_key_is_found_out() -> None:
    found: dict[int, str] = {}

    def meet(group: GlooGroup) -> None:
        try:
            check_members(group, "stage-0", (b"one", b"another")[group.rank], "cpu")
        except EngineDead as error:
            found[group.rank] = error.message

    together(meet)
    assert sorted(found) == [0, 1] and "met somebody who is no rank of theirs" in found[0]


def test_who_waits_for_a_host_that_is_gone_need_not_any_more_once_its_group_is_aborted() -> None:
    ended = threading.Event()

    def meet(group: GlooGroup) -> None:
        if group.rank:  # it never answers, and its connection stays
            ended.wait(10)
            return
        threading.Timer(0.1, group.abort).start()
        with pytest.raises(RuntimeError):
            group.all_reduce(torch.zeros(1))
        ended.set()

    together(meet)
    assert ended.is_set()


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline", "context", "nodes"), [
    (1, 2, 1, 2), (2, 2, 1, 2), (4, 1, 1, 2), (4, 1, 1, 4), (2, 2, 1, 4), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 4),
])  # fmt: skip
def test_ranks_of_nodes_answer_as_one_does_and_end_with_node_0(
    llama: str, tensor: int, pipeline: int, context: int, nodes: int
) -> None:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "context_parallel_size": context}
    with spread(llama, nodes, **sizes) as (llm, others):
        assert answers(llm) == alone(llama)
        pids = others.pids
        assert len(pids) == tensor * pipeline * context * (nodes - 1) // nodes
    assert others.ends == dict.fromkeys(range(1, nodes)) and all(map(gone, pids.values()))


@pytest.mark.slow
def test_a_rank_of_another_node_that_is_stopped_ends_all_and_is_named(llama: str) -> None:
    with spread(llama, tensor_parallel_size=2) as (llm, others):
        (pid,) = others.pids.values()
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank 1 of node 1 .* has been silent for 20 s"):
            answers(llm)
        assert time.monotonic() - begun < 30
    assert gone(pid)


@contextmanager
def commands(model: str, *more: str) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """Two nodes as people start them."""
    port = free_port()
    flags = ("--device", "cpu", "--threads", "1", "--dtype", "float32", "--kv-cache-memory", "8M", "-tp", "2")
    flags = (*flags, "--nnodes", "2", "--master-port", str(port), *more)
    node = subprocess.Popen(
        (sys.executable, "-m", "headrace", "serve", model, *flags, "--node-rank", "1"),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with serving(model, *flags, command=SERVE) as server:
            yield server, node
    finally:
        node.kill()
        node.wait()


def followers(node: int) -> list[int]:
    found = subprocess.run(("pgrep", "-P", str(node)), stdout=subprocess.PIPE, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_of_a_node_ends_the_server_and_its_ranks(llama: str, kind: signal.Signals) -> None:
    with commands(llama) as (server, node):
        assert server.ask("POST", "/v1/completions", ASKED).status == 200
        ranks = followers(node.pid)
        assert len(ranks) == 1
        node.send_signal(kind)
        assert server.wait(5 if kind == signal.SIGKILL else 35) == 1
        said = "closed its connection" if kind == signal.SIGKILL else "has been silent for 20 s"
        assert any(f"node 1 (127.0.0.1) {said}" in line for line in server.lines), server.lines
        wait_for(lambda: all(map(gone, ranks)) or kind == signal.SIGSTOP, 5)
        if kind == signal.SIGSTOP:  # they end; who started them cannot notice
            wait_for(lambda: "Z" in Path(f"/proc/{ranks[0]}/stat").read_text(encoding="utf-8").split(), 5)


@pytest.mark.slow
def test_a_killed_node_0_ends_the_others_and_a_stopped_one_ends_them_with_itself(llama: str) -> None:
    with commands(llama) as (server, node):
        (rank,) = followers(node.pid)
        (engine,) = server.members("headrace.engine.process")
        os.kill(engine, signal.SIGKILL)
        assert node.wait(5) == 1 and "Node 0 at 127.0.0.1" in (node.stderr.read() if node.stderr else "")
        wait_for(lambda: gone(rank), 5)
    with commands(llama) as (server, node):
        (rank,) = followers(node.pid)
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0 and node.wait(5) == 0 and gone(rank)


@pytest.mark.slow
def test_supervised_nodes_come_together_again_behind_the_port(llama: str) -> None:
    with commands(llama, "--supervise") as (server, node):
        wanted = server.ask("POST", "/v1/completions", ASKED).json["choices"][0]["token_ids"]
        (rank,) = followers(node.pid)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: (found := followers(node.pid)) and found != [rank], 60)
        wait_for(lambda: _ready(server), 60)
        assert server.ask("POST", "/v1/completions", ASKED).json["choices"][0]["token_ids"] == wanted
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0 and node.wait(5) == 0


def _ready(server: Any) -> bool:
    try:
        return bool(server.ask("GET", "/ready", timeout=2).status == 200)
    except OSError:
        return False


@pytest.mark.slow
def test_an_adapter_that_hosts_have_not_alike_is_refused_and_others_go_on(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A path that is not absolute lies elsewhere on the other node."""
    made, (here, there) = tiny.create("llama"), (tmp_path / "here", tmp_path / "there")
    for folder, names in ((here, ("same", "other", "missing")), (there, ("same", "other"))):
        for name in names:
            adapters.write(folder / name, made, targets=("q_proj",), seed=int(name == "other" and folder == there))

    def start(*given: Any) -> Any:
        monkeypatch.chdir(there)
        try:
            return begin(*given)
        finally:
            monkeypatch.chdir(here)

    begin = node.start
    monkeypatch.setattr(node, "start", start)
    monkeypatch.chdir(here)
    with spread(llama, tensor_parallel_size=2, lora_dir=".") as (llm, _):

        def ask(name: str) -> Any:
            return llm.generate([5, 6, 7], GREEDY, use_tqdm=False, lora_request=LoRARequest(name))[0].outputs[0]

        wanted = ask("same").token_ids
        assert [ask(name).finish_reason for name in ("other", "missing")] == ["error", "error"]
        assert len(wanted) == 8 and ask("same").token_ids == wanted
        said = list(llm.engine.core.adapters._failed.values())  # type: ignore[union-attr]
    assert len(said) == 2 and all("is not the same on all hosts" in each for each in said)
    assert caplog.text.count("rank 1 of node 1 (127.0.0.1) has other files") == 2


# --- Ray


@pytest.fixture
def ray_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes with a CPU each, and the second of them."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    paths = (str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster, second
    finally:
        cluster.shutdown()


def test_a_process_that_uses_gpus_already_takes_none_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.parallel.on_ray import Actors

    actors = Actors.__new__(Actors)
    monkeypatch.setattr(Actors, "close", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="gives the first rank GPU 1, but this process uses GPUs already"):
        actors._take("1")


def test_an_engine_after_another_gets_the_same_gpu_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.parallel.on_ray import Actors

    monkeypatch.setattr(Actors, "_sees", None, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    used = [False, True, True, True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used.pop(0))
    for _ in range(2):
        actors = Actors.__new__(Actors)
        actors._connects, actors._watcher, actors._saw = False, None, None
        actors._take("1")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        for _ in range(2):
            actors.close()
            assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_rank_sees_the_gpu_of_its_bundle(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cluster that has three, it says; ranks compute on their CPUs, as nothing else is there."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])))
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address="127.0.0.2")
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        keywords: dict[str, Any] = {**SIZES, "distributed_executor_backend": "ray", "device": "auto"}
        with LLM(llama, **keywords, pipeline_parallel_size=3) as llm:
            assert answers(llm) == alone(llama)
            seen = [os.environ["CUDA_VISIBLE_DEVICES"], *followers_see()]
            assert len(seen) == 3 and set(seen) == {"0", "1"}  # the second host's is its first
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    finally:
        cluster.shutdown()


def followers_see() -> list[str]:
    """CUDA_VISIBLE_DEVICES of all ranks' processes but the first."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"headrace.parallel.follower" in (each / "cmdline").read_bytes():
                environment = (each / "environ").read_bytes().split(b"\0")
                found += [line.decode().partition("=")[2] for line in environment if line.startswith(b"CUDA_VISIBLE")]
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_actors_of_ray_answer_as_one_rank_does_and_a_killed_node_is_noticed(
    llama: str, ray_nodes: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.parallel import on_ray

    cluster, second = ray_nodes
    keywords: dict[str, Any] = {**SIZES, "distributed_executor_backend": "ray"}
    monkeypatch.setattr(on_ray, "_PLACE_SECONDS", 3.0)
    with pytest.raises(ConfigError, match=r"no place for 4 ranks with a CPU each.* CPUs are free"):
        LLM(llama, **keywords, tensor_parallel_size=4)
    with LLM(llama, **keywords, pipeline_parallel_size=2) as llm:
        assert answers(llm) == alone(llama)
    with LLM(llama, **keywords, tensor_parallel_size=2) as llm:
        assert answers(llm) == alone(llama)
        cluster.remove_node(second, allow_graceful=False)
        begun = time.monotonic()
        with pytest.raises(EngineDead, match=r"(the actor of rank 1|rank 1 ).*; all ranks end with it"):
            while True:
                answers(llm)
        assert time.monotonic() - begun < 5
