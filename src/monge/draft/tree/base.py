"""The tree builder interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.proposal import Proposal
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import GrowingTree, TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """What a tree builder may produce.

    Args:
        proposes: Kinds of proposals it uses.
        max_width: Most candidates of one node.
        max_depth: Deepest node.
        max_nodes: Most drafted nodes, the root not counted.
    """

    proposes: frozenset[type[Proposal]]
    max_width: int
    max_depth: int
    max_nodes: int


class TreeBuilder(ABC):
    """Grows a tree level by level. Usable by every drafter that has a law for each node.

    Which nodes of a level get children, how many, and how they are drawn may depend on the text,
    the plan, earlier levels and the draft laws at the level's own nodes: on nothing that this level
    draws. `GrowingTree.grow_level` checks it.
    """

    @property
    @abstractmethod
    def limits(self) -> TreeLimits:
        """What it may produce."""

    def under(self, rules: SamplingRules) -> "TreeBuilder":
        """The builder for a request with these sampling rules: this one, unless it has several."""
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

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        """Return the finished tree; a builder that ranks all nodes at the end prunes it here."""
        return tree.finish()


def nodes_left(tree: GrowingTree, plan: DraftPlan, own: int) -> int:
    """Drafted nodes that a plan still allows, to be read before a level is drawn.

    A builder takes the *declared* width of every node that gets children off this number. Counting
    the nodes drawn so far in the same level would let its repeated tokens decide which of its nodes
    get children; rules for whole trees are then biased.

    Args:
        tree: The tree, down to the level whose children come next.
        plan: The round's limits.
        own: The builder's own number of drafted nodes.
    """
    return max(0, plan.nodes(own) - (tree.num_nodes - 1))


def check_sizes(builder: str, **sizes: int) -> None:
    """Refuse sizes below one."""
    for name, size in sizes.items():
        if size < 1:
            raise OptionError(f"{builder}: {name} must be at least 1; got {size}")
