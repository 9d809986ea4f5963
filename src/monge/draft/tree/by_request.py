"""One tree for greedy requests, another for sampled ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.base import TreeBuilder, TreeLimits


@dataclass(frozen=True, slots=True)
class ByRequest(TreeBuilder):
    """Build one tree for greedy requests and another for sampled ones.

    Greedy requests gain from several of the most probable tokens, sampled ones from draws of the
    draft law. A drafter that does not call `under` builds the sampled trees, which are exact for
    greedy requests too.

    Args:
        greedy: For requests at temperature 0.
        sampled: For all others.
    """

    greedy: TreeBuilder
    sampled: TreeBuilder

    @property
    def limits(self) -> TreeLimits:
        ours, theirs = self.greedy.limits, self.sampled.limits
        return TreeLimits(
            proposes=ours.proposes | theirs.proposes,
            max_width=max(ours.max_width, theirs.max_width),
            max_depth=max(ours.max_depth, theirs.max_depth),
            max_nodes=max(ours.max_nodes, theirs.max_nodes),
        )

    def under(self, rules: SamplingRules) -> TreeBuilder:
        return (self.greedy if rules.temperature == 0 else self.sampled).under(rules)

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        return self.sampled.expand(tree, frontier, laws, plan, draws)

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        return self.sampled.finish(tree, plan)
