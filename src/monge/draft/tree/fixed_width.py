"""The same number of candidates for every node of a depth."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.tree import GrowingTree
from monge.draft.tree.base import TreeBuilder, TreeLimits, check_sizes, nodes_left
from monge.draft.tree.children import check_kind, children_of, way_of_drawing


@dataclass(frozen=True, slots=True)
class FixedWidth(TreeBuilder):
    """A tree whose nodes of depth j have `widths[j]` candidates each.

    Under a plan with fewer nodes, a node whose candidates might not all fit gets none. A level is
    counted with the widths that its nodes declare, so which nodes these are depends on earlier
    levels only, not on repeated tokens of this one.

    Args:
        widths: Candidates per node, from the root downwards.
        children: How they are drawn: `iid`, `without_replacement`, `top`, `greedy_plus_one`,
            `mixed(1)`.
    """

    widths: tuple[int, ...] = (3, 2, 1, 1)
    children: str = "without_replacement"

    def __post_init__(self) -> None:
        if not self.widths:
            raise OptionError("fixed_width: give at least one width")
        check_sizes(
            "fixed_width", **{f"widths[{depth}]": width for depth, width in enumerate(self.widths)}
        )
        check_kind("fixed_width", self.children, max(self.widths))

    @property
    def limits(self) -> TreeLimits:
        level, total = 1, 0
        for width in self.widths:
            level *= width
            total += level
        return TreeLimits(
            proposes=frozenset({way_of_drawing(self.children).proposes}),
            max_width=max(self.widths),
            max_depth=len(self.widths),
            max_nodes=total,
        )

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        depth = tree.depths[frontier[0]]
        width = self.widths[depth]
        num_served = nodes_left(tree, plan, self.limits.max_nodes) // width
        served = list(zip(frontier, laws, strict=True))[:num_served]
        proposals = {node: children_of(self.children, law, width) for node, law in served}
        grown = [
            child for children in tree.grow_level(proposals, draws).values() for child in children
        ]
        return grown if depth + 1 < plan.depth(len(self.widths)) else ()
