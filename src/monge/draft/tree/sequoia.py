"""Sequoia's static tree."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.tree import GrowingTree
from monge.draft.tree.base import TreeBuilder, TreeLimits, check_sizes
from monge.draft.tree.children import check_kind, children_of, way_of_drawing
from monge.draft.tree.sequoia_shape import Shape, best_shape, check_acceptance


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
        check_sizes("sequoia", num_nodes=self.num_nodes, depth=self.depth)
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
