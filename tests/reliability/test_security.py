"""The checks of checks_security.py in their fast form, each with a planted defect that turns it red."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import Unauthorized
from headrace.models import gguf_file
from headrace.processes.messages import Unpacker
from headrace.server.limits import Guard
from tests.reliability import checks_boundary, checks_security
from tests.support.planted import planted
from tests.support.serving import SERVE, Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--executor", "keyed-hash", command=SERVE) as running:
        yield running


def test_no_code_is_made_of_data() -> None:
    checks_security.code_from_data()


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "torch.load(f)",
        "yaml.load(f)",
        "socket.recv_pyobj",
        "load(f, allow_pickle=True)",
    ],
)
def test_code_made_of_data_is_noticed(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(line)
    with pytest.raises(AssertionError):
        checks_security.code_from_data(tmp_path)


def test_an_assert_that_judges_input_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "request.py").write_text("assert 1 <= n <= 128")
    with pytest.raises(AssertionError, match=r"request\.py:1"):
        checks_security.code_from_data(tmp_path)


def test_hostile_bodies_start_nothing_and_reach_nobody_under_python_o() -> None:
    checks_security.audited(lambda server: checks_boundary.lattice(300, server, every=12), optimised=True)


def test_unpickling_is_heard() -> None:
    defect = """
        import base64, pickle
        from headrace.server import exchange
        begin = exchange.Exchange.begin
        bad = pickle.dumps(print)
        exchange.Exchange.begin = lambda self, *given: (pickle.loads(bad), begin(self, *given))[1]
    """
    with pytest.raises(AssertionError, match="find_class"):
        checks_security.audited(lambda server: server.ask("GET", "/version"), command=planted(defect))


def test_strangers_stay_outside() -> None:
    checks_security.strangers()


def test_a_door_to_the_inside_is_noticed() -> None:
    defect = """
        import itertools, os, socket
        from headrace.engine import connection
        pair, number = socket.socketpair, itertools.count()
        def named():
            pairs = pair()
            pairs[0].bind(f"\\0planted {os.getpid()} {next(number)}")
            return pairs
        connection.socket.socketpair = named
    """
    with pytest.raises(AssertionError, match="planted"):
        checks_security.strangers(command=planted(defect))


def test_damaged_frames_are_refused_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_security.damaged_frames(1500)
    monkeypatch.setattr(Unpacker, "_decoded", lambda self, body: self._decoder.decode(body))
    with pytest.raises(Exception, match=r"codec|msgpack|MessagePack|Invalid|Expected|truncated"):
        checks_security.damaged_frames(200)


def test_time_tells_nothing_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_security.key_timing(3000)

    def careless(self: Guard, headers: list[tuple[bytes, bytes]]) -> None:
        given = headers[0][1].partition(b" ")[2]
        for one, other in zip(given, b"k" * 32, strict=True):
            if one != other:
                raise Unauthorized("wrong")

    monkeypatch.setattr(Guard, "check_key", careless)
    with pytest.raises(AssertionError, match="z ="):
        checks_security.key_timing(3000)


def test_foreign_pages_are_refused(server: Server) -> None:
    checks_security.browsers(server)


def test_a_door_open_to_foreign_pages_is_noticed() -> None:
    defect = "from headrace.server import limits; limits.Guard.check_browser = lambda self, headers: ()"
    with serving("--executor", "keyed-hash", command=planted(defect)) as open_server, pytest.raises(AssertionError):
        checks_security.browsers(open_server)


def test_unique_names_make_no_series() -> None:
    checks_security.cardinality(400)


def test_a_series_for_each_path_is_noticed() -> None:
    defect = """
        from headrace.server.exposition import ServerMetrics
        count = ServerMetrics.count_answer
        def count_more(self, route, status):
            self.answers._places[route + str(len(self.answers)), "4xx"] = 0
            count(self, route, status)
        ServerMetrics.count_answer = count_more
    """
    with pytest.raises(AssertionError, match="series"):
        checks_security.cardinality(40, command=planted(defect))


def test_damaged_model_files_are_refused_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_security.model_files(500)
    monkeypatch.setattr(gguf_file._Reader, "_take", lambda self, count: self._where(count))
    with pytest.raises(AttributeError):
        checks_security.model_files(50)
