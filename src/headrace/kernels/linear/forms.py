"""Forms of Triton's products of few rows.

What lives here: the noun. What may not: which form is best.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.candidate import Shape

VECTOR, FLAT = "vector", "flat"


@dataclass(frozen=True, slots=True)
class Form:
    """How a product of few rows is launched: ``rows`` and ``columns`` of a program's result, ``depth`` of K it
    reads at once.

    ``ways``: steps under way while one is used (vector: 0 to 2), programs that share out K (flat).
    """

    kind: str
    rows: int
    columns: int
    depth: int
    ways: int
    warps: int = 4
    stages: int = 1
    late: bool = False

    def fits(self, shape: Shape) -> bool:
        """Vectors load without a mask along K; a gate needs all of K in one program."""
        if self.kind == VECTOR:
            return shape.ins % self.depth == 0
        return self.ways == 1 or (not shape.gated and shape.ins >= self.ways * self.depth)


Forms = tuple[tuple[int, Form | None], ...]  # up to so many rows: this form, or the vendor's product
