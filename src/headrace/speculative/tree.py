"""Trees of drafts: the most probable continuations by a draft model, within a budget of tokens (SpecExec, Svirschevski et
al. 2024, arXiv 2406.02532, Alg. 1), verified at once (SpecInfer, Miao et al. 2024).

A path's probability is the product of its tokens', so no token is more probable than the one before it: the best tokens
of all that were looked at form a tree, and looking on only behind those among the best finds the best of all.

What lives here: the tree, its growth, which path is accepted. What may not: torch, models, where keys lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 62  # tokens behind a root: their places are bits of one int64
_PACE, _LEAST_SURE, _SUREST = 0.02, 0.5, 4.0


@dataclass(frozen=True, slots=True)
class Tree:
    """Token 0 is the row's last known one, token i + 1 the draft i, which stands behind token ``parents[i]`` ≤ i."""

    parents: tuple[int, ...]

    @property
    def ancestors(self) -> list[int]:
        """Of each token, as ``TreeInputs`` has them."""
        masks = [1]
        for parent in self.parents:
            masks.append(masks[parent] | 1 << len(masks))
        return masks

    def behind(self, drafts: Sequence[int]) -> dict[tuple[int, int], int]:
        """By where a token stands, and which it is: the one behind it."""
        return {(parent, draft): at + 1 for at, (parent, draft) in enumerate(zip(self.parents, drafts, strict=True))}

    def accepted(self, drafts: Sequence[int], samples: Sequence[int | None]) -> tuple[list[int], list[int]]:
        """From what was sampled behind each token (None: nothing usable): the tokens that count, and where in the tree
        those stand that were right."""
        behind = self.behind(drafts)
        at: int | None = 0
        tokens, path = list[int](), list[int]()
        while at is not None and (token := samples[at]) is not None:
            tokens.append(token)
            at = behind.get((at, token))
            path += [] if at is None else [at]
        return tokens, path[: len(tokens) - 1] if tokens else []


@dataclass(frozen=True, slots=True)
class Found:
    """What may follow a token: the best ``tokens``, with the logarithms of their probabilities as they are believed
    (``scores``) and as the draft model gives them (``given``), whose mean as believed is ``expected``."""

    tokens: Sequence[int]
    scores: Sequence[float]
    given: Sequence[float]
    expected: float


class Belief:
    """How sure a draft model may be taken to be: its probabilities are raised to ``exponent``, which follows the
    likelihood of what is sampled. Greedy answers agree with its best token more often than it says."""

    def __init__(self) -> None:
        self.exponent = 1.0

    def learn(self, tokens: Sequence[int], drafts: Sequence[int], tree: Tree, found: Sequence[Found | None]) -> None:
        """``tokens``: what the text goes on with; ``found``: by token of the tree. One that was not among the best is
        taken to be the least of them."""
        behind = tree.behind(drafts)
        at: int | None = 0
        for token in tokens:
            here = None if at is None else found[at]
            if here is None:
                return
            place = here.tokens.index(token) if token in here.tokens else -1
            slope = here.given[place] - here.expected
            self.exponent = min(_SUREST, max(_LEAST_SURE, self.exponent + _PACE * slope))
            at = behind.get((at or 0, token))


@dataclass(slots=True, eq=False)
class Node:
    """``score``: the logarithm of its path's probability. ``place``: behind the root, where its key lies while the tree
    grows; 0: it has none."""

    token: int
    parent: Node | None
    score: float
    depth: int
    place: int = 0
    found: Found | None = None

    @property
    def ancestors(self) -> int:
        """By places, as ``TreeInputs`` has them."""
        node: Node | None = self
        bits = 1
        while node is not None:
            bits |= 1 << node.place
            node = node.parent
        return bits


class Growing:
    """One row's tree of at most ``budget`` drafts. ``frontier``: those behind which it has yet to be looked."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._best: list[Node] = []  # by falling score; of equal ones those before the ones behind them
        self._root = Node(-1, None, 0.0, 0)
        self.frontier = [self._root]

    def add(self, found: Sequence[Found]) -> None:
        """What may follow each of the frontier."""
        new = []
        for parent, each in zip(self.frontier, found, strict=True):
            parent.found = each
            for token, score in zip(each.tokens, each.scores, strict=True):
                before = None if parent is self._root else parent
                new.append(Node(token, before, parent.score + min(score, 0.0), parent.depth + 1))
        self._take(new)

    def _take(self, found: list[Node]) -> None:
        self._best = sorted([*self._best, *found], key=lambda node: -node.score)[: self._budget]
        full, kept = len(self._best) == self._budget, set(map(id, self._best))
        least = self._best[-1].score  # nothing behind a token of this score would be among the best
        self.frontier = [node for node in found if id(node) in kept and not (full and node.score <= least)]
        taken = {node.place for node in self._best}
        free = (place for place in range(1, self._budget + 1) if place not in taken)
        for node in self.frontier:
            node.place = next(free)

    def grown(self) -> tuple[list[int], Tree, list[Found | None]]:
        """Its tokens, by depth, where each stands, and what may follow the root and each of them, as far as it was
        looked at."""
        nodes = sorted(self._best, key=lambda node: node.depth)
        at = {id(node): index + 1 for index, node in enumerate(nodes)}
        parents = tuple(0 if node.parent is None else at[id(node.parent)] for node in nodes)
        return [node.token for node in nodes], Tree(parents), [node.found for node in (self._root, *nodes)]
