"""A tree of sampled children that is wide and deep where the draft law says it pays."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.proposal import Deterministic, Proposal
from monge.core.tree import GrowingTree
from monge.draft.tree.base import TreeBuilder, TreeLimits, check_sizes, nodes_left
from monge.draft.tree.children import check_kind, children_of, way_of_drawing


@dataclass(frozen=True, slots=True)
class Threshold(TreeBuilder):
    """Give a node another candidate while that candidate is reached, and new, with probability at least `min_prob`.

    With v the draft's probability of the path to a node and q the draft law there, the k-th draw is
    worth `v sum_i q_i (1 - q_i)^(k-1)`, the chance that the path is right and the draw is no
    repeat; the k-th of the most probable tokens is worth `v q_(k)`. The numbers of candidates of a
    level are fixed from these values before any of them is drawn, so the tree adapts to the text
    and to earlier levels and still anticipates nothing: unlike a ranked tree it may hold sampled
    children.

    Args:
        min_prob: Smallest worth of a candidate, in (0, 1].
        depth: Deepest node.
        width: Most candidates of a node.
        num_nodes: Most drafted nodes; nodes of likelier paths are served first, and one whose
            candidates might not all fit gets none. A level counts with the widths that its nodes
            declare, repeats included.
        children: How children are drawn.

    Reference:
        The threshold variant of DySpec (Xiong et al., arXiv 2410.11744), with the number of
        siblings fixed before the draw.
    """

    min_prob: float = 0.1
    depth: int = 6
    width: int = 4
    num_nodes: int = 32
    children: str = "iid"

    def __post_init__(self) -> None:
        check_sizes("threshold", depth=self.depth, width=self.width, num_nodes=self.num_nodes)
        check_kind("threshold", self.children, self.width)
        if not 0.0 < self.min_prob <= 1.0:
            raise OptionError(
                f"threshold: min_prob is a probability in (0, 1]; got {self.min_prob}"
            )

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(
            proposes=frozenset({way_of_drawing(self.children).proposes}),
            max_width=self.width,
            max_depth=self.depth,
            max_nodes=self.num_nodes,
        )

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        left, law_of = (
            nodes_left(tree, plan, self.num_nodes),
            dict(zip(frontier, laws, strict=True)),
        )
        proposals: dict[int, Proposal] = {}
        for node in sorted(frontier, key=lambda node: -tree.path_probs[node]):
            width = self._width(tree.path_probs[node], law_of[node])
            if 0 < width <= left:
                proposals[node] = children_of(self.children, law_of[node], width)
                left -= width
        following: list[int] = []
        for node, children in tree.grow_level(proposals, draws).items():
            for child in children:
                tree.path_probs[child] = tree.path_probs[node] * law_of[node].prob(
                    tree.token_ids[child]
                )
                following.append(child)
        # The first candidate of a node is worth its path: below the threshold there is none.
        worth_reading = [node for node in following if tree.path_probs[node] >= self.min_prob]
        return worth_reading if tree.depths[frontier[0]] + 1 < plan.depth(self.depth) else ()

    def _width(self, path_prob: float, law: Law) -> int:
        if way_of_drawing(self.children).proposes is Deterministic:
            return sum(path_prob * mass >= self.min_prob for _, mass in law.top_masses(self.width))
        q = law.sparse().probs
        fresh, width = q.clone(), 0
        while width < self.width and path_prob * float(fresh.sum()) >= self.min_prob:
            width += 1
            fresh = fresh * (1.0 - q)
        return width
