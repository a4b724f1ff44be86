"""Steps while kernels that only some of them want are still being built: they do without.

What lives here: what such a step is told, and waiting for the kernels. What may not: building (kernels/ahead.py), which kernels may come
later (their rehearsals say so).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.request import StepPlan

if TYPE_CHECKING:
    from headrace.kernels.ahead import Behind


class LaterKernels:
    """All that may come later is attention over keys that sequences share. Until it is there, steps are told that theirs share none: graphs,
    fused and plain attention are asked as for any such step, and the whole step agrees. What is computed is the same but for rounding.
    """

    def __init__(self, behind: Behind) -> None:
        self._behind = behind

    @property
    def there(self) -> bool:
        return self._behind.there

    @property
    def arrived(self) -> float | None:
        """When they were all there, in ``time.time()``."""
        return self._behind.arrived

    def without(self, plan: StepPlan) -> StepPlan:
        """``plan``, as it can be taken now."""
        return plan if self.there or plan.shared_tokens == 0 else replace(plan, shared_tokens=0)

    def wait(self, seconds: float) -> bool:
        return self._behind.wait(seconds)

    def close(self) -> None:
        self._behind.close()
