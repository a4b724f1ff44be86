"""Which steps computed a request, for those that asked (``explain``): how many, and how near the physical limit they were.

What lives here: counting. What may not: pricing steps (metrics.py), words. Nothing is done while nobody has asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from headrace.request import Request, SequenceOutput, StepAccount
from headrace.sequence import Sequence

MAX_KEPT = 256  # accounts of requests that have ended


@dataclass(slots=True)
class _Account:
    open_answers: set[int]
    steps: int = 0
    shares: int = 0  # steps whose share of the limit is known
    total_share: float = 0.0
    preemptions: dict[int, int] = field(default_factory=dict)  # by answer

    def add_step(self, share: float | None) -> None:
        self.steps += 1
        if share is not None:
            self.shares += 1
            self.total_share += share

    def read(self) -> StepAccount:
        return StepAccount(self.steps, self.total_share / self.shares if self.shares else None, sum(self.preemptions.values()))


class StepAccounts:
    """True while there are requests to count for."""

    def __init__(self) -> None:
        self._open: dict[int, _Account] = {}
        self._ended: dict[int, StepAccount] = {}  # oldest first

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, request: Request) -> None:
        self._open[request.request_id] = _Account(set(range(request.params.n)))

    def end(self, request_id: int, index: int) -> None:
        """One answer of a request has ended."""
        account = self._open.get(request_id)
        if account is not None:
            account.open_answers.discard(index)
            if not account.open_answers:
                self.close(request_id)

    def close(self, request_id: int) -> None:
        account = self._open.pop(request_id, None)
        if account is not None:
            self._ended[request_id] = account.read()
            while len(self._ended) > MAX_KEPT:
                del self._ended[next(iter(self._ended))]

    def count(self, work: Iterable[Sequence], share: float | None) -> None:
        """One step computed tokens of these sequences, at this fraction of the limit."""
        counted = set()
        for sequence in work:
            account = self._open.get(sequence.request_id) if sequence.request.explain else None
            if account is None:
                continue
            account.preemptions[sequence.index] = sequence.num_preemptions
            if sequence.request_id not in counted:
                counted.add(sequence.request_id)
                account.add_step(share)

    def settle(self, outputs: Seq[SequenceOutput]) -> Seq[SequenceOutput]:
        """The same outputs; ends carry what was counted."""
        if not self._open:
            return outputs
        return [out if out.finished is None else self._settled(out) for out in outputs]

    def _settled(self, out: SequenceOutput) -> SequenceOutput:
        account, finished = self._open.get(out.request_id), out.finished
        if account is None or finished is None:
            return out
        settled = out._replace(finished=replace(finished, account=account.read()))
        self.end(out.request_id, out.index)
        return settled

    def find(self, request_id: int) -> StepAccount | None:
        account = self._open.get(request_id)
        return account.read() if account is not None else self._ended.get(request_id)
