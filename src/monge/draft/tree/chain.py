"""One candidate per node."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.tree import GrowingTree
from monge.draft.tree.base import TreeBuilder, TreeLimits, check_sizes
from monge.draft.tree.children import check_kind, children_of, way_of_drawing


@dataclass(frozen=True, slots=True)
class Chain(TreeBuilder):
    """A chain: one child per node, drawn from the draft law or its most probable token.

    Args:
        depth: Number of draft tokens.
        children: `iid` draws the token, `top` takes the most probable one.
    """

    depth: int = 3
    children: str = "iid"

    def __post_init__(self) -> None:
        check_sizes("chain", depth=self.depth)
        check_kind("chain", self.children, 1)

    @property
    def limits(self) -> TreeLimits:
        kinds = frozenset({way_of_drawing(self.children).proposes})
        return TreeLimits(proposes=kinds, max_width=1, max_depth=self.depth, max_nodes=self.depth)

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        (node,), (law,) = frontier, laws
        children = tree.grow(node, children_of(self.children, law, 1), draws)
        return children if tree.num_nodes - 1 < plan.nodes(plan.depth(self.depth)) else ()
