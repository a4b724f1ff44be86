"""What a start says: a line that is drawn again on a terminal, a few plain ones elsewhere, nothing for what is
quick."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headrace.observe import progress
from headrace.observe.progress import LoadingLine, ProgressLine, format_bytes, say, waiting
from headrace.server.run import describe
from headrace.server.run import say as server_say

GB = 10**9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """Each text that was drawn, without what moves the cursor."""
        return [text.rstrip("\n").removesuffix("\x1b[K") for text in self.getvalue().split("\r")[1:]]


class Seconds:
    """time.perf_counter that a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    clock = Seconds()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setenv("COLUMNS", "80")
    return clock


@pytest.fixture
def level() -> Iterator[logging.Logger]:
    logger = logging.getLogger("headrace")
    before = logger.level
    yield logger
    logger.setLevel(before)


def load(clock: Seconds, line: LoadingLine, seconds: float) -> None:
    """4 GB, evenly; eight layers behind an embedding of half a GB."""
    for _ in range(8):
        clock.now += seconds / 8
        line.add(GB // 2)
    line.close()


ENDS = [GB // 2 * n for n in range(2, 9)]


def test_a_terminal_sees_bytes_layers_and_speed_on_one_line(clock: Seconds) -> None:
    terminal, said = Terminal(), []
    load(clock, LoadingLine(4 * GB, ENDS, terminal, said.append), 8)
    shown = terminal.shown()
    assert "Loading weights [#######.......] 2.0 GB of 4.0 GB, 3 of 7 layers, 500 MB/s" in shown
    assert shown[-1] == "" and "\n" not in terminal.getvalue()  # the line is gone, and no other was used
    assert said == []


def test_elsewhere_there_are_few_lines_and_a_sum(clock: Seconds) -> None:
    stream, said = io.StringIO(), []
    load(clock, LoadingLine(4 * GB, ENDS, stream, said.append), 40)
    assert stream.getvalue() == ""
    assert [line.partition(",")[0] for line in said] == [
        "Loading weights: 1.5 GB of 4.0 GB", "Loading weights: 3.0 GB of 4.0 GB", "Loaded 4.0 GB of weights in 40 s."
    ]  # fmt: skip


def test_what_is_quick_says_nothing(clock: Seconds) -> None:
    for stream in (Terminal(), io.StringIO()):
        said: list[str] = []
        load(clock, LoadingLine(4 * GB, ENDS, stream, said.append), 0.4)
        with waiting("Packing", "Packed", stream=stream, tell=said.append):
            pass
        assert stream.getvalue() == "" and said == []


def test_a_narrow_terminal_gets_no_second_line(clock: Seconds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    load(clock, LoadingLine(4 * GB, ENDS, terminal), 8)
    assert max(map(len, terminal.shown())) == 29


def test_waiting_counts_seconds_on_a_terminal_and_sums_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUICK_SECONDS", 0.01)
    terminal, said = Terminal(), []
    drawn = progress.threading.Event()
    monkeypatch.setattr(terminal, "flush", drawn.set)
    with waiting("Compiling", "Compiled", slow=True, stream=terminal, tell=said.append):
        assert drawn.wait(10)
    assert terminal.shown()[0] == "Compiling: 0 s" and terminal.shown()[-1] == "" and said == ["Compiled in 0 s."]


def test_waiting_for_what_is_slow_is_said_beforehand_elsewhere() -> None:
    said: list[str] = []
    with waiting("Compiling, once", "Compiled", slow=True, stream=io.StringIO(), tell=said.append):
        assert said == ["Compiling, once …"]
    with pytest.raises(OSError), waiting("Compiling", "Compiled", slow=True, stream=io.StringIO(), tell=said.append):
        raise OSError
    assert said == ["Compiling, once …", "Compiling …"]  # what failed is not said to be done


def test_who_hears_a_line(
    level: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    level.setLevel(logging.NOTSET)
    say("nobody: a program that uses the package")
    level.setLevel(logging.WARNING)
    say("nobody: warnings alone are wanted")
    assert not progress.TerminalLine(Terminal()).visible
    level.setLevel(logging.INFO)
    assert progress.TerminalLine(Terminal()).visible
    say("a person\x1b[2J")
    assert capsys.readouterr().err == "a person\\x1b[2J\n"
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "json")
    say("a collector")
    assert capsys.readouterr().err == "" and not progress.TerminalLine(Terminal()).visible


def test_requests_done(clock: Seconds) -> None:
    terminal = Terminal()
    line = ProgressLine(2, "Generating", terminal)
    for _ in range(2):
        clock.now += 1.0
        line.add_tokens(10)
        line.update()
    line.close()
    assert terminal.shown()[-1] == "Generating [##############] 2/2, 10 tokens/s" and terminal.getvalue().endswith("\n")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1500, "1.5 kB"), (250 * 10**6, "250 MB"), (1_234_567_890, "1.2 GB"), (2 * 10**12, "2.0 TB")],
)
def test_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_server_without_a_tokenizer_says_what_it_takes() -> None:
    info = SimpleNamespace(served_names=("a",), dtype="float32", device="cpu", max_sequence_tokens=100, decisions=())
    said = ["\n".join(describe(SimpleNamespace(info=info, tokenizer=each))) for each in (None, object())]  # type: ignore[arg-type]
    assert "token ids only; --tokenizer takes another model's folder." in said[0] and "token ids" not in said[1]


def test_a_servers_line_takes_the_place_of_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    server_say("Ready")
    assert terminal.getvalue() == "\r\x1b[KReady\n"
