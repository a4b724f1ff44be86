"""Weights on their way to the card, beside what is still queued there."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.models.streaming import Source, stream
from tests.support.card import require_card

require_card()

SIZE = 4 * 2**20
LONG = 2**31  # cycles: about a second


def test_weights_do_not_overtake_what_is_queued_where_they_go(tmp_path: Path) -> None:
    """A tensor's memory is handed on as soon as its last use is queued, not when it has ended."""
    file, device = tmp_path / "weights", torch.device("cuda")
    wanted = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    file.write_bytes(wanted.numpy().tobytes())
    source = [Source(file, 0, torch.float32, (SIZE,), torch.empty(SIZE, device=device))]
    stream(source, device, readers=1)  # pinned memory is taken anew once a process: that alone waits for the device
    before = torch.empty(SIZE, device=device)
    place = before.data_ptr()
    torch.cuda._sleep(LONG)
    before.fill_(7.0)
    del before
    target = torch.empty(SIZE, device=device)
    assert target.data_ptr() == place, "the allocator no longer does what this is about"
    stream([Source(file, 0, torch.float32, (SIZE,), target)], device, readers=1)
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), wanted)
