"""What a call site calls while its kernel may still prove impossible to build.

What lives here: the guard around a candidate's callable. What may not: choosing (the registry says who takes over),
judging errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GiveWay = Callable[[Exception], Any]  # the successor's callable; raises the error itself if there is to be none


class Guarded:
    """Calls a candidate; if its kernel cannot be built, the successor takes this call and every later one.

    A kernel is compiled by its first call, and again by the first call of another specialisation, so the guard stays.
    It costs one Python call (a tenth of a microsecond), touches no tensor, and is not there when a captured graph is
    replayed.
    """

    __slots__ = ("_give_way", "_run")

    def __init__(self, run: Any, give_way: GiveWay) -> None:
        self._run = run
        self._give_way = give_way

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._run(*arguments, **named)
        except Exception as error:  # give_way raises it again unless it says that the kernel cannot be built
            self._run = self._give_way(error)
        return self._run(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """Whoever is called now answers for itself."""
        return getattr(self._run, name)


def guarded(run: Any, give_way: GiveWay, *, makes: bool) -> Any:
    """``makes``: ``run`` makes the callable of a layer (from its weights), and what it makes is guarded; None stays
    None."""
    if not makes:
        return Guarded(run, give_way)

    def make(*weights: Any) -> Guarded | None:
        made = run(*weights)
        return None if made is None else Guarded(made, lambda error: give_way(error)(*weights))

    return make
