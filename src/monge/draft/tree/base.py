"""The tree builder interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.parts import Part
from monge.core.sampling_rules import SamplingRules
from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.levels import LevelShape
from monge.laws.proposal import Proposal
from monge.laws.tree import GrowingTree, TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """Limits of the trees of a builder.

    Args:
        proposes: Kinds of proposals it uses.
        max_width: Most candidates of a node.
        max_depth: Deepest node.
        max_nodes: Most drafted nodes, the root not counted.
    """

    proposes: frozenset[type[Proposal]]
    max_width: int
    max_depth: int
    max_nodes: int


class TreeBuilder(Part, ABC):
    """Grows a tree level by level, for any drafter that has a law for each node.

    The children of a level may depend on the text, the plan, earlier levels and the draft laws at
    the level's own nodes. They may not depend on what this level draws; `GrowingTree.grow_level`
    checks it.
    """

    @property
    @abstractmethod
    def limits(self) -> TreeLimits:
        """Limits of its trees."""

    def under(self, rules: SamplingRules) -> "TreeBuilder":
        """Return the builder for a request with these sampling rules."""
        return self

    @abstractmethod
    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        """Draw the children of the frontier's nodes, given their draft laws.

        Returns:
            The nodes to be read next: those that will get children in the coming level.
        """

    def level(
        self, tree: GrowingTree, frontier: Sequence[int], plan: DraftPlan, rules: SamplingRules
    ) -> tuple[LevelShape, int] | None:
        """Return how `expand` would draw the next level, if tensors can draw it.

        `expand` then takes the drawn children in place of `draws`.

        Args:
            tree: The tree.
            frontier: The nodes whose children come next.
            plan: The round's limits.
            rules: How logits become draft laws.

        Returns:
            The shape of the level below each node, and the number of nodes that get children: the
            first nodes come first. `None`, as by default, if `expand` must draw.
        """
        return None

    def shape(
        self, plan: DraftPlan, rules: SamplingRules, max_depth: int | None
    ) -> LevelShape | None:
        """Return the shape of its trees, if tensors can draw them and no drawn token changes it.

        Args:
            plan: The round's limits, of at least one level and one node.
            rules: How logits become draft laws.
            max_depth: Largest depth with a draft law; `None` for unbounded.
        """
        return None

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        """Return the finished tree; a builder that ranks all nodes at the end prunes it here."""
        return tree.finish()


@dataclass(frozen=True, slots=True)
class ByRequest(TreeBuilder):
    """Build a tree for greedy requests, and another tree for sampled requests.

    Greedy requests gain from several of the most probable tokens, sampled requests from draws of
    the draft law. A drafter that does not call `under` builds the sampled trees, which are exact
    for greedy requests too.

    Args:
        greedy: For requests at temperature 0.
        sampled: For all others.
    """

    greedy: TreeBuilder
    sampled: TreeBuilder

    @property
    def limits(self) -> TreeLimits:
        both = self.greedy.limits, self.sampled.limits
        return TreeLimits(
            proposes=both[0].proposes | both[1].proposes,
            max_width=max(limits.max_width for limits in both),
            max_depth=max(limits.max_depth for limits in both),
            max_nodes=max(limits.max_nodes for limits in both),
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


def nodes_left(tree: GrowingTree, plan: DraftPlan, own: int) -> int:
    """Return the number of drafted nodes that a plan still allows, before a level is drawn.

    A builder subtracts the *declared* width of every node that gets children. If it counted drawn
    nodes instead, repeated tokens of a level would decide which of its nodes get children, and
    rules for whole trees would be biased.

    Args:
        tree: The tree, down to the level whose children come next.
        plan: The round's limits.
        own: The builder's own number of drafted nodes.
    """
    return max(0, plan.nodes(own) - (tree.num_nodes - 1))
