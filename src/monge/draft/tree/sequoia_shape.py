"""Sequoia's dynamic program: the static tree of largest expected acceptance.

`P[b]` is the probability that the b-th candidate of a node is the accepted one. A tree of n nodes
(its root counted) whose root has b children is best when

    T[n, b] = max over m of T[n - m, b - 1] + P[b] max over j of T[m, j],      T[1, 0] = 1,

where the last child owns a subtree of m nodes (Sequoia, Chen et al., arXiv 2402.12374, section
3.2); with a depth limit every subtree is one level shallower. T counts the committed tokens of a
round, correction or bonus token included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from monge.core.errors import OptionError


@dataclass(frozen=True, slots=True)
class Shape:
    """A static tree: the subtree of every child, in drawing order."""

    children: tuple["Shape", ...] = ()

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return 1 + sum(child.num_nodes for child in self.children)

    @property
    def depth(self) -> int:
        """Deepest node; 0 for a root alone."""
        return max((1 + child.depth for child in self.children), default=0)

    @property
    def width(self) -> int:
        """Most children of one node."""
        return max((len(self.children), *(child.width for child in self.children)))

    def expected_tokens(self, acceptance: Sequence[float]) -> float:
        """Return the committed tokens of a round, which the dynamic program maximises."""
        return 1.0 + sum(
            prob * child.expected_tokens(acceptance)
            for prob, child in zip(acceptance, self.children, strict=False)
        )


def check_acceptance(owner: str, acceptance: Sequence[float]) -> None:
    """Refuse a list that does not hold disjoint chances.

    Raises:
        OptionError: If the list is empty, an entry is negative or NaN, or they sum to more than
            one.
    """
    good = (
        len(acceptance) > 0 and all(prob >= 0.0 for prob in acceptance) and sum(acceptance) <= 1.0
    )
    if not good:
        raise OptionError(
            f"{owner}: acceptance lists the chance that the first, second, .. candidate is the "
            "accepted one: one or more, none "
            f"negative, at most 1 together; got {tuple(acceptance)}"
        )


def best_shape(num_nodes: int, depth: int, acceptance: tuple[float, ...]) -> Shape:
    """Return the tree of at most `num_nodes` drafted nodes and `depth` levels with the most expected tokens.

    Args:
        num_nodes: Drafted nodes, the root not counted.
        depth: Deepest node.
        acceptance: `P`; its length bounds the width.
    """
    return max(
        best_shapes(num_nodes, depth, acceptance),
        key=lambda shape: shape.expected_tokens(acceptance),
    )


@lru_cache(maxsize=64)
def best_shapes(num_nodes: int, depth: int, acceptance: tuple[float, ...]) -> tuple[Shape, ...]:
    """Return the best tree of at most `depth` levels for every number of drafted nodes from 0 up.

    A tree may leave nodes unused.
    """
    if depth == 0:
        return (Shape(),) * (num_nodes + 1)
    below = best_shapes(num_nodes, depth - 1, acceptance)
    worth = [shape.expected_tokens(acceptance) for shape in below]
    # exact[n]: the value of exactly b children that own n nodes together, and how many nodes lie
    # below each of them.
    exact: dict[int, tuple[float, tuple[int, ...]]] = {0: (1.0, ())}
    best: list[tuple[float, tuple[int, ...]]] = [(1.0, ())] * (num_nodes + 1)
    for prob in acceptance:
        wider: dict[int, tuple[float, tuple[int, ...]]] = {}
        for size, (value, owns) in exact.items():
            for own in range(num_nodes - size):
                total = value + prob * worth[own]
                if total > wider.get(size + own + 1, (0.0, ()))[0]:
                    wider[size + own + 1] = (total, (*owns, own))
        exact = wider
        best = [
            max(old, exact.get(size, old), key=lambda choice: choice[0])
            for size, old in enumerate(best)
        ]
    for size in range(1, num_nodes + 1):
        best[size] = max(best[size], best[size - 1], key=lambda choice: choice[0])
    return tuple(Shape(tuple(below[own] for own in owns)) for _, owns in best)
