"""Fair shares: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

Each tenant has a counter of the service it got, divided by its weight. The tenant of the least counter goes next;
within a tenant, arrival decides. A tenant that had none waiting is lifted to the least counter of those who do (or,
if none waits, of the last that did), so that idling earns no credit.

    service  =  input price · prompt tokens computed (those found in the cache are free, those computed again are not
    charged again)
              + output price · tokens of answers

None is preempted for the sake of fairness, so shares are right up to what runs at once. For two tenants f and g who
both have requests waiting all through an interval, with W the service each got in it:

    | W_f / w_f  −  W_g / w_g |  ≤  2 · (input price · longest prompt + output price · rows · longest answer) / min(w)

What lives here: counters, lifting, charging. What may not: who is a tenant (the server says), whether there is room
(step_planner.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies.protocol import DynamicPolicy, Order, Refusal
from headrace.scheduler.roster import Roster, Sequence, WaitingQueue

_KEPT = 64  # tenants who are away; of more, those are forgotten whom a lift would put where they are


@dataclass(slots=True)
class _Account:
    """One live sequence: what of it has been charged, in tokens. Both only grow, whatever is computed again."""

    tenant: str
    prompt: int = 0
    outputs: int = 0


class Fair(DynamicPolicy):
    """See the module. ``weights``: of tenants by name; others have 1. Prices are those of one token."""

    def __init__(self, weights: Mapping[str, float], input_price: float, output_price: float) -> None:
        self._weights = weights
        self._input_price, self._output_price = input_price, output_price
        self._accounts: dict[Sequence, _Account] = {}
        self._running: dict[Sequence, _Account] = {}  # of these
        self._counters: dict[str, float] = {}
        self._live: dict[str, int] = {}  # sequences by tenant
        self._waiting: dict[str, int] = {}  # of these; tenants with none are not here
        self._last = ""  # the tenant whose request left the queue last
        self._charged = False  # at this moment, everything

    def order(self, request: Request, arrival_number: int) -> Order:
        return (0.0, arrival_number)

    def create_queue(self) -> WaitingQueue:
        return WaitingQueue(lambda sequence: sequence.request.tenant, self.counter)

    def counter(self, tenant: str) -> float:
        """The service it got, or is taken to have got, by its weight."""
        return self._counters.get(tenant, 0.0)

    # --- what happens

    def arrived(self, sequence: Sequence, roster: Roster) -> Refusal | None:
        self._charge_all()
        self._open(sequence)
        self._enter(sequence.request.tenant)
        return None

    def consider(self, roster: Roster) -> Iterable[tuple[Sequence, Refusal]]:
        if self._waiting:
            self._charge_all()
        self._charged = False  # whatever comes next comes after a step
        return ()

    def admitted(self, sequence: Sequence, now: float) -> None:
        """Its prompt is charged at once, so that the next choice of the same step knows. While it runs its place is
        that of its admission: were it to follow the counter, two could push each other out for ever."""
        account = self._accounts.get(sequence)
        if account is None:  # a sibling: its prompt was its brother's
            account = self._open(sequence)
            account.prompt = sequence.num_prompt_tokens
        else:
            self._leave(account.tenant)
        self._running[sequence] = account
        sequence.order = (self.counter(account.tenant), sequence.order[-1])
        computed = max(account.prompt, sequence.num_prompt_tokens - sequence.num_computed_tokens)
        self._charge(account.tenant, self._input_price * (computed - account.prompt))
        account.prompt = computed

    def left(self, sequence: Sequence, now: float) -> None:
        account = self._accounts[sequence]
        if self._running.pop(sequence, None) is None:
            self._leave(account.tenant)
        else:
            self._charge_outputs(sequence, account)
        if sequence.status is SequenceStatus.FINISHED:
            self._close(sequence, account.tenant)
        else:
            sequence.order = (0.0, sequence.order[-1])
            self._enter(account.tenant)

    # --- counters

    def _charge_all(self) -> None:
        """The answers' new tokens, once between two steps."""
        if not self._charged:
            self._charged = True
            for sequence, account in self._running.items():
                self._charge_outputs(sequence, account)

    def _charge_outputs(self, sequence: Sequence, account: _Account) -> None:
        outputs = sequence.num_output_tokens
        if outputs > account.outputs:
            self._charge(account.tenant, self._output_price * (outputs - account.outputs))
            account.outputs = outputs

    def _charge(self, tenant: str, service: float) -> None:
        self._counters[tenant] = self.counter(tenant) + service / self._weights.get(tenant, 1.0)

    def _floor(self) -> float:
        """What no newcomer is below."""
        return min(map(self.counter, self._waiting)) if self._waiting else self.counter(self._last)

    def _enter(self, tenant: str) -> None:
        """One more of its requests waits."""
        if tenant not in self._waiting:
            self._counters[tenant] = max(self.counter(tenant), self._floor())
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def _leave(self, tenant: str) -> None:
        self._last = tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    # --- who is here

    def _open(self, sequence: Sequence) -> _Account:
        tenant = sequence.request.tenant
        account = self._accounts[sequence] = _Account(tenant)
        self._live[tenant] = self._live.get(tenant, 0) + 1
        return account

    def _close(self, sequence: Sequence, tenant: str) -> None:
        del self._accounts[sequence]
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if len(self._counters) > _KEPT + 2 * len(self._live):
                self._forget()

    def _forget(self) -> None:
        """Whoever is away and not above the floor would be lifted to it anyway."""
        floor = self._floor()
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if tenant in self._live or tenant == self._last or counter > floor
        }
