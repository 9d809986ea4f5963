"""The same number of candidates for every node of a depth; a chain has a single candidate per node."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.core.setting_types import check_bounds
from monge.draft.tree.base import TreeBuilder, TreeLimits, nodes_left
from monge.draft.tree.children import check_kind, way_of_drawing
from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.levels import LevelShape
from monge.laws.proposal import Proposal
from monge.laws.tree import DrawnTokens, GrowingTree


class LevelTree(TreeBuilder):
    """A tree in which all nodes of a depth have the same number of candidates."""

    children: str

    @property
    @abstractmethod
    def level_widths(self) -> tuple[int, ...]:
        """Candidates per node, from the root downwards."""

    @property
    def kind(self) -> type[Proposal]:
        """How children are drawn."""
        return way_of_drawing(self.children).proposes

    @property
    def has_rows(self) -> bool:
        """True if the children of many nodes can be drawn as tensors; see `Proposal.draw_rows`."""
        return self.kind.draw_rows is not None and type(self).expand == LevelTree.expand

    @property
    def limits(self) -> TreeLimits:
        widths = self.level_widths
        return TreeLimits(
            proposes=frozenset({self.kind}),
            max_width=max(widths),
            max_depth=len(widths),
            max_nodes=sum(accumulate(widths, mul)),
        )

    def served(self, tree: GrowingTree, frontier: Sequence[int], plan: DraftPlan) -> int:
        """Return how many nodes of the frontier get children within a plan: the first nodes come first."""
        widths = self.level_widths
        left = nodes_left(tree, plan, sum(accumulate(widths, mul)))
        return min(len(frontier), left // widths[tree.depths[frontier[0]]])

    def level(
        self, tree: GrowingTree, frontier: Sequence[int], plan: DraftPlan, rules: SamplingRules
    ) -> tuple[LevelShape, int] | None:
        width = self.level_widths[tree.depths[frontier[0]]]
        count = self.served(tree, frontier, plan)
        # A point mass has no second token.
        is_known = self.has_rows and (width == 1 or rules.temperature > 0)
        return (LevelShape(widths=(width,), kind=self.kind), count) if is_known and count else None

    def shape(
        self, plan: DraftPlan, rules: SamplingRules, max_depth: int | None
    ) -> LevelShape | None:
        widths = self.level_widths
        depth = min(plan.depth(len(widths)), len(widths) if max_depth is None else max_depth)
        shape = LevelShape(widths=widths[:depth], kind=self.kind)
        # A repeated token is one node, and a point mass has no second one.
        is_narrow = max(shape.widths) == 1
        is_known = is_narrow or (not shape.kind.may_repeat and rules.temperature > 0)
        is_usual = type(self).finish == TreeBuilder.finish
        fits = sum(shape.sizes) <= plan.nodes(self.limits.max_nodes)
        return shape if self.has_rows and is_known and is_usual and fits else None

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws | DrawnTokens,
    ) -> Sequence[int]:
        widths, depth = self.level_widths, tree.depths[frontier[0]]
        most = sum(accumulate(widths, mul))
        served = zip(frontier[: self.served(tree, frontier, plan)], laws, strict=False)
        way = way_of_drawing(self.children)
        proposals = {node: way.propose(law, widths[depth]) for node, law in served}
        grown = [
            child for children in tree.grow_level(proposals, draws).values() for child in children
        ]
        is_last = depth + 1 >= plan.depth(len(widths))
        return () if is_last or nodes_left(tree, plan, most) < widths[depth + 1] else grown


@dataclass(frozen=True, slots=True)
class FixedWidth(LevelTree):
    """A tree whose nodes of depth j have `widths[j]` candidates each.

    Under a plan with fewer nodes, a node whose candidates might not all fit gets none. A level is
    counted with the widths that its nodes declare, so which nodes these are depends on earlier
    levels only, not on repeated tokens of this level.

    Args:
        widths: Candidates per node, from the root downwards.
        children: How they are drawn: `iid`, `without_replacement`, `top`, `greedy_plus_one`,
            `mixed(1)`.

    Reference:
        The static trees of SpecInfer (Miao et al., arXiv 2305.09781).
    """

    widths: tuple[int, ...] = (3, 2, 1, 1)
    children: str = "without_replacement"

    def __post_init__(self) -> None:
        if not self.widths:
            raise OptionError("fixed_width: give at least one width")
        check_bounds(
            "fixed_width", **{f"widths[{depth}]": width for depth, width in enumerate(self.widths)}
        )
        check_kind("fixed_width", self.children, max(self.widths))

    @property
    def level_widths(self) -> tuple[int, ...]:
        return self.widths


@dataclass(frozen=True, slots=True)
class Chain(LevelTree):
    """A chain: a child per node, drawn from the draft law or its most probable token.

    Args:
        depth: Number of draft tokens.
        children: `iid` draws the token, `top` takes the most probable token.

    Reference:
        Leviathan et al., arXiv 2211.17192.
    """

    depth: int = 3
    children: str = "iid"

    def __post_init__(self) -> None:
        check_bounds("chain", depth=self.depth)
        check_kind("chain", self.children, 1)

    @property
    def level_widths(self) -> tuple[int, ...]:
        return (1,) * self.depth
