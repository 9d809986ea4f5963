"""A tree that grows deeper only while its expected gain pays for another draft step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.draft.tree.best_first import BestFirst


@dataclass(frozen=True, slots=True)
class OptTree(TreeBuilder):
    """The `num_nodes` nodes of largest path probability, as deep as a level adds at least `min_gain` expected tokens.

    The sum of the path probabilities of the nodes kept is the expected number of accepted tokens if
    the draft law were the target's. It never falls when a level is added; the level that raises it
    by less than `min_gain` is the last.

    Args:
        num_nodes: Drafted nodes.
        depth: Deepest node whatever the gain.
        width: Candidates looked at per node.
        min_gain: Expected accepted tokens that a level must add for the next one to be read.

    Reference:
        OPT-Tree (Wang et al., arXiv 2406.17276), Algorithm 1; every node that is among the best so
        far is read, so the tree is the best one for these path probabilities and this width
        (theorem 3.2 there).
    """

    num_nodes: int = 16
    depth: int = 6
    width: int = 4
    min_gain: float = 0.2

    def __post_init__(self) -> None:
        self._ranking()
        if not self.min_gain >= 0.0:
            raise OptionError(
                "opt_tree: min_gain must be at least 0 (0 grows to the full "
                f"depth); got {self.min_gain}"
            )

    @property
    def limits(self) -> TreeLimits:
        return self._ranking().limits

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        before = self._expected(tree, plan)
        following = self._ranking().expand(tree, frontier, laws, plan, draws)
        return following if self._expected(tree, plan) - before >= self.min_gain else ()

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        return self._ranking().finish(tree, plan)

    def _expected(self, tree: GrowingTree, plan: DraftPlan) -> float:
        return math.fsum(sorted(tree.path_probs[1:], reverse=True)[: plan.nodes(self.num_nodes)])

    def _ranking(self) -> BestFirst:
        return BestFirst(self.num_nodes, self.depth, self.width, beam=self.num_nodes)
