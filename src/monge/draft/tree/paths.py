"""Independent paths, merged where they agree."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.setting_types import check_bounds
from monge.draft.tree.base import TreeBuilder, TreeLimits, nodes_left
from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.proposal import Iid, PathDraws, Proposal
from monge.laws.tree import GrowingTree


@dataclass(frozen=True, slots=True)
class Paths(TreeBuilder):
    """Paths drawn independently from the root, as a prefix tree that counts the paths through each node.

    A node that m paths reach has m independent candidates, repeats kept: the rules for independent
    draws then verify it with its own number of draws. At most `num_paths` * `depth` nodes, and
    fewer the more the paths agree.

    Under a plan with fewer nodes, a node draws no more candidates than certainly fit, and the other
    paths that pass it end there: how many do is known before the level is drawn. Then
    whether a node has candidates depends on other paths than its own, and they are declared as
    independent draws of the node alone.

    Args:
        num_paths: K.
        depth: Draft tokens of every path.

    Reference:
        SpecTr (Sun et al., arXiv 2310.15141): K drafts of length L from the draft model.
    """

    num_paths: int = 4
    depth: int = 4

    def __post_init__(self) -> None:
        check_bounds("paths", num_paths=self.num_paths, depth=self.depth)

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(
            proposes=frozenset[type[Proposal]]({PathDraws, Iid}),
            max_width=self.num_paths,
            max_depth=self.depth,
            max_nodes=self.num_paths * self.depth,
        )

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        # Where the plan may end some paths early, what a node draws depends on other nodes: no
        # promise about paths then.
        all_fit = plan.nodes(self.limits.max_nodes) >= self.num_paths * plan.depth(self.depth)
        kind = PathDraws if all_fit else Iid
        left = nodes_left(tree, plan, self.limits.max_nodes)
        proposals: dict[int, Proposal] = {}
        for node, law in zip(frontier, laws, strict=True):
            passing = tree.multiplicity(node) if node else self.num_paths
            if (width := min(passing, left)) > 0:
                proposals[node] = kind(law, width)
                left -= width
        grown = [
            child for children in tree.grow_level(proposals, draws).values() for child in children
        ]
        return grown if tree.depths[frontier[0]] + 1 < plan.depth(self.depth) else ()
