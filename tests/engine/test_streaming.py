"""Weights read by several threads through buffers equal those read one tensor at a time, and a file that ends early is
said."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.kernels import Kernels
from headrace.models import loader, streaming
from headrace.models.checkpoint import KeyNames, SafetensorsCheckpoint
from headrace.models.decoder import Decoder
from headrace.models.families import spec_from_config
from headrace.models.source import ModelSource, find_model
from headrace.models.streaming import Source, stream
from headrace.models.weight_rules import ignored_keys, weight_rules
from tests.support import tiny

CPU = torch.device("cpu")


def load(
    source: ModelSource, dtype: torch.dtype, *, streamed: bool, buffer_bytes: int = 1000
) -> dict[str, torch.Tensor]:
    spec = spec_from_config(source.config)
    decoder = Decoder(spec, kernels=Kernels(CPU), dtype=dtype, device=CPU, max_model_len=64)
    for tensor in decoder.parameters():
        tensor.data.fill_(7.0)
    checkpoint = SafetensorsCheckpoint(source.path)
    if streamed:
        parameters, names = dict(decoder.named_parameters()), KeyNames(checkpoint.keys())
        copies = [
            copy
            for rule in weight_rules(spec)
            for copy in loader._copies(parameters[rule.target], rule, checkpoint, names, dtype)
        ]
        stream([loader._source(copy, checkpoint) for copy in copies], CPU, readers=3, buffer_bytes=buffer_bytes)
    else:
        loader.load_weights(decoder, checkpoint, weight_rules(spec), ignored_keys(spec), dtype)
    return dict(decoder.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_streamed_weights_are_the_weights(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged, stacked, transposed, cast; tensors shared by readers, spans that end within a buffer, files in shards."""
    monkeypatch.setattr(streaming, "_SPAN_BYTES", 4096)
    source = find_model(ModelConfig(model=str(tiny.save(name, tmp_path, shard_size="60KB"))))
    plain, streamed = (load(source, dtype, streamed=each) for each in (False, True))
    assert all(torch.equal(tensor, plain[key]) for key, tensor in streamed.items())


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    source = find_model(ModelConfig(model=str(tiny.save("llama", tmp_path))))
    entry = max(SafetensorsCheckpoint(source.path)._entries.values(), key=lambda entry: entry.start)
    entry.file.write_bytes(entry.file.read_bytes()[: entry.start + 1])
    with pytest.raises(ModelError, match=r"model\.safetensors ends at byte \d+, within a tensor"):
        stream([Source(entry.file, entry.start, torch.float32, entry.shape, torch.empty(entry.shape))], CPU)


def test_one_failure_ends_all_readers(tmp_path: Path) -> None:
    """What is left is not read for nothing."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(4096))
    targets = [torch.full((1024,), 1.0) for _ in range(50)]
    sources = [Source(tmp_path / "gone", 0, torch.float32, (1024,), torch.empty(1024))]
    sources += [Source(file, 0, torch.float32, (1024,), target) for target in targets]
    with pytest.raises(ModelError, match="gone"):
        stream(sources, CPU, readers=1)
    assert not any((target == 0.0).any() for target in targets)


def test_an_interrupted_load_does_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, begun = tmp_path / "weights", threading.Event()
    file.write_bytes(bytes(4096))
    targets = [torch.full((1024,), 1.0) for _ in range(300)]
    fill = streaming._Lane.fill

    def slowly(self: streaming._Lane, span: Source) -> None:
        begun.set()
        time.sleep(0.01)
        fill(self, span)

    def interrupted(self: Future[None]) -> None:
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming._Lane, "fill", slowly)
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream([Source(file, 0, torch.float32, (1024,), target) for target in targets], CPU, readers=2)
    assert sum(bool((target == 0.0).all()) for target in targets) < 20


class FakeStream:
    """As torch.cuda.Stream, as far as readers use it: what it waits for."""

    def __init__(self, device: torch.device) -> None:
        self.waits_for: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waits_for.append(event)

    def synchronize(self) -> None: ...


def test_no_reader_begins_before_what_was_queued_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target may lie where a tensor was that a kernel still writes."""
    queued, waited, buffer, fill = object(), [], streaming._Buffer, streaming._Lane.fill

    def watched(lane: streaming._Lane, span: Source) -> None:
        waited.append(lane._stream.waits_for)  # type: ignore[union-attr]
        fill(lane, span)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: queued))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(streaming, "_Buffer", lambda size, device: buffer(size, CPU))
    monkeypatch.setattr(streaming._Lane, "fill", watched)
    wanted = torch.randn(6, 100)
    tmp_path.joinpath("weights").write_bytes(wanted.numpy().tobytes())
    targets = torch.zeros(6, 100)
    stream(
        [Source(tmp_path / "weights", 400 * i, torch.float32, (100,), targets[i]) for i in range(6)],
        torch.device("cuda"),
        readers=3,
    )
    assert torch.equal(targets, wanted) and waited == [[queued]] * 6
