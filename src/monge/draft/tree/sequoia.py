"""Sequoia's static tree, found by dynamic programming.

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

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.setting_types import check_bounds
from monge.core.tree import GrowingTree
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.draft.tree.children import check_kind, children_of, way_of_drawing


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
        for size, (value, children) in exact.items():
            for child in range(num_nodes - size):
                total = value + prob * worth[child]
                if total > wider.get(size + child + 1, (0.0, ()))[0]:
                    wider[size + child + 1] = (total, (*children, child))
        exact = wider
        best = [
            max(old, exact.get(size, old), key=lambda choice: choice[0])
            for size, old in enumerate(best)
        ]
    for size in range(1, num_nodes + 1):
        best[size] = max(best[size], best[size - 1], key=lambda choice: choice[0])
    return tuple(Shape(tuple(below[child] for child in children)) for _, children in best)


@dataclass(frozen=True, slots=True)
class Sequoia(TreeBuilder):
    """The static tree that accepts most on average, given how often the first, second, .. candidate is the accepted one.

    The shape is found by dynamic programming before anything is drawn, and again for every smaller
    depth or node count that a plan asks for. Early candidates get deep subtrees, late ones none.

    Args:
        num_nodes: Drafted nodes.
        depth: Deepest node; one forward of the draft model per level.
        acceptance: Chance of the first, second, .. candidate of a node to be the accepted one;
            their number is the largest width.
        children: How children are drawn; the acceptance should have been measured for the same way.

    Raises:
        OptionError: If a size is below one, or the acceptance is not a list of disjoint chances.

    Reference:
        Sequoia (Chen et al., arXiv 2402.12374), section 3.2.
    """

    num_nodes: int = 16
    depth: int = 5
    acceptance: tuple[float, ...] = (0.6, 0.13, 0.06, 0.03)
    children: str = "without_replacement"

    def __post_init__(self) -> None:
        check_bounds("sequoia", num_nodes=self.num_nodes, depth=self.depth)
        check_acceptance("sequoia", self.acceptance)
        check_kind("sequoia", self.children, len(self.acceptance))

    @property
    def limits(self) -> TreeLimits:
        shape = self.shape(DraftPlan())
        return TreeLimits(
            proposes=frozenset({way_of_drawing(self.children).proposes}),
            max_width=shape.width,
            max_depth=shape.depth,
            max_nodes=shape.num_nodes - 1,
        )

    def shape(self, plan: DraftPlan) -> Shape:
        """Return the tree's shape under a plan."""
        return best_shape(
            plan.nodes(self.num_nodes), plan.depth(self.depth), tuple(self.acceptance)
        )

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        shape, following = self.shape(plan), list[int]()
        subtrees = {node: _below(shape, tree, node).children for node in frontier}
        proposals = {
            node: children_of(self.children, law, len(subtrees[node]))
            for node, law in zip(frontier, laws, strict=True)
        }
        for node, grown in tree.grow_level(proposals, draws).items():
            # A repeated draw leaves fewer nodes than candidates: the first ones take the larger
            # subtrees.
            following.extend(
                child
                for child, subtree in zip(grown, subtrees[node], strict=False)
                if subtree.children
            )
        return following


def _below(shape: Shape, tree: GrowingTree, node: int) -> Shape:
    """Return the subtree that belongs to a node: children of a node are numbered in a row."""
    if node == 0:
        return shape
    parent = tree.parents[node]
    return _below(shape, tree, parent).children[node - tree.parents.index(parent)]
