"""Trees of drafts without a model: the best within a budget, and what of them is accepted."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from headrace.speculative.tree import Belief, Found, Growing, Tree


def _grow(budget: int, topk: int, chances: dict[tuple[int, ...], list[float]]) -> tuple[list[int], Tree]:
    growing = Growing(budget)

    def best(path: tuple[int, ...]) -> Found:
        order = sorted(range(len(chances[path])), key=lambda token: -chances[path][token])[:topk]
        return _found(order, [math.log(chances[path][token]) for token in order])

    def path_of(node) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        return () if node is None else (*path_of(node.parent), node.token)

    growing.add([best(())])
    while growing.frontier:
        places = [node.place for node in growing.frontier]
        assert len(set(places)) == len(places) and all(1 <= place <= budget for place in places)
        for node in growing.frontier:  # all that it sees have places of their own
            assert node.ancestors.bit_count() == node.depth + 1
        growing.add([best(path_of(node)) for node in growing.frontier])
    return growing.grown()[:2]


def _found(tokens: Sequence[int], scores: Sequence[float], expected: float = 0.0) -> Found:
    return Found(tokens, scores, scores, expected)


def _paths(tokens: list[int], tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, tree.parents, strict=True):
        assert parent < len(paths)
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 3, 9])
def test_the_most_probable_continuations_are_found(seed: int, budget: int) -> None:
    """Of all paths of up to eight tokens, by trying every one."""
    draw, chances, every = random.Random(seed), {}, {}
    for depth in range(9):
        for path in itertools.product(range(3), repeat=depth):
            weights = [draw.random() ** 3 + 1e-3 for _ in range(3)]
            chances[path] = [weight / sum(weights) for weight in weights]
            every[path] = math.prod(chances[path[:at]][token] for at, token in enumerate(path))
    del every[()]
    tokens, tree = _grow(budget, 3, chances)
    found = _paths(tokens, tree)
    assert sorted(found) == sorted(sorted(every, key=lambda path: -every[path])[:budget])


def test_one_continuation_of_each_is_a_chain() -> None:
    chances = {tuple(range(depth)): [0.9 if token == depth else 0.02 for token in range(6)] for depth in range(6)}
    tokens, tree = _grow(5, 1, chances)
    assert tokens == [0, 1, 2, 3, 4] and tree.parents == (0, 1, 2, 3, 4)
    assert tree.ancestors == [1, 3, 7, 15, 31, 63]


def test_equal_scores_leave_no_token_without_those_before_it() -> None:
    growing = Growing(4)
    growing.add([_found([1, 2], [0.0, 0.0])])
    growing.add([_found([3, 4], [0.0, 0.0])] * 2)
    tokens, tree, found = growing.grown()
    assert len(found) == 5 and found[0] is not None and found[4] is None
    assert tokens[:2] == [1, 2] and all(parent <= at for at, parent in enumerate(tree.parents))


def test_the_path_of_what_is_sampled_is_accepted() -> None:
    tree, drafts = Tree((0, 0, 1, 2, 4)), [5, 6, 7, 8, 9]
    assert tree.accepted(drafts, [6, 0, 8, 0, 9, 3]) == ([6, 8, 9, 3], [2, 4, 5])
    assert tree.accepted(drafts, [5, 4, 0, 0, 0, 0]) == ([5, 4], [1])
    assert tree.accepted(drafts, [1, 0, 0, 0, 0, 0]) == ([1], [])
    assert tree.accepted(drafts, [6, 0, None, 0, 0, 0]) == ([6], [])  # the next step finds it out again
    assert tree.accepted(drafts, [None, 0, 0, 0, 0, 0]) == ([], [])


@pytest.mark.parametrize(("true", "least", "most"), [(1.0, 0.8, 1.25), (2.5, 2.0, 3.0), (50.0, 3.5, 4.0)])
def test_belief_follows_what_is_sampled(true: float, least: float, most: float) -> None:
    """From probabilities raised to ``true``; the last is greedy."""
    draw, belief = random.Random(0), Belief()
    for _ in range(4000):
        given = [draw.gauss(0.0, 1.0) for _ in range(5)]
        total = math.log(sum(map(math.exp, given)))
        given = [each - total for each in given]
        believed = [math.exp(belief.exponent * each) for each in given]
        expected = sum(a * b for a, b in zip(believed, given, strict=True)) / sum(believed)
        (token,) = draw.choices(range(5), [math.exp(true * each) for each in given])
        belief.learn([token], [], Tree(()), [Found(range(5), given, given, expected)])
    assert least <= belief.exponent <= most
