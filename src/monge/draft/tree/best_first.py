"""Trees that are wide and deep where the draft law says that it pays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.proposal import Deterministic, Proposal
from monge.core.setting_types import check_bounds
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.base import TreeBuilder, TreeLimits, nodes_left
from monge.draft.tree.children import check_kind, children_of, way_of_drawing


@dataclass(frozen=True, slots=True)
class BestFirst(TreeBuilder):
    """The `num_nodes` nodes of largest path probability under the draft law.

    Every level reads the `beam` most probable nodes that can still be among the best, and looks at
    the `width` most probable children of each; at the end the best `num_nodes` stay. Path
    probabilities fall along a path, so these form a tree, and with a wide enough beam it is the
    tree of largest total path probability. Everything is a function of the text, never of a draw:
    the candidates are `Deterministic`.

    Args:
        num_nodes: Drafted nodes.
        depth: Deepest node; one forward of the draft model per level.
        width: Candidates looked at per node.
        beam: Nodes read per level.

    Reference:
        EAGLE-2 (Li et al., arXiv 2406.16858), expansion and re-ranking; optimal for the estimated
        path probabilities as in OPT-Tree (Wang et al., arXiv 2406.17276).
    """

    num_nodes: int = 16
    depth: int = 5
    width: int = 4
    beam: int = 4
    _name: ClassVar[str] = "best_first"

    def __post_init__(self) -> None:
        check_bounds(
            self._name, num_nodes=self.num_nodes, depth=self.depth, width=self.width, beam=self.beam
        )

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(
            proposes=frozenset({Deterministic}),
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
        best = {node: law.top_masses(self.width) for node, law in zip(frontier, laws, strict=True)}
        proposals = {
            node: Deterministic(tuple(token for token, _ in masses))
            for node, masses in best.items()
        }
        grown: set[int] = set()
        for node, children in tree.grow_level(proposals, draws).items():
            for child, (_, mass) in zip(children, best[node], strict=True):
                tree.path_probs[child] = tree.path_probs[node] * mass
            grown.update(children)
        if tree.depths[frontier[0]] + 1 >= plan.depth(self.depth):
            return ()
        # A node that is not among the best has no descendant among them, so it is not read.
        return [node for node in self._best(tree, plan) if node in grown][: self.beam]

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        return tree.finish().prune(self._best(tree, plan))

    def _best(self, tree: GrowingTree, plan: DraftPlan) -> list[int]:
        # The sort is stable and parents precede children, so a child never outranks its parent.
        nodes = sorted(range(1, tree.num_nodes), key=lambda node: -tree.path_probs[node])
        return nodes[: plan.nodes(self.num_nodes)]


@dataclass(frozen=True, slots=True)
class Eagle2(BestFirst):
    """EAGLE-2's dynamic tree: `best_first` with the authors' sizes.

    It reads as many nodes per level as a node has candidates. A controller that limits the depth
    keeps the number of nodes.

    Args:
        num_nodes: Drafted nodes (`total_token`).
        depth: Deepest node.
        width: Candidates per node, and nodes read per level (`top_k`).
        beam: Nodes read per level; 0 for `width`.

    Reference:
        EAGLE-2 (Li et al., arXiv 2406.16858), sizes of its public code.
    """

    num_nodes: int = 60
    depth: int = 7
    width: int = 10
    beam: int = 0
    _name: ClassVar[str] = "eagle2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam", self.beam or self.width)
        BestFirst.__post_init__(self)


@dataclass(frozen=True, slots=True)
class OptTree(BestFirst):
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

    depth: int = 6
    beam: int = field(init=False, repr=False, compare=False)
    min_gain: float = 0.2
    _name: ClassVar[str] = "opt_tree"

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam", self.num_nodes)
        BestFirst.__post_init__(self)
        if not self.min_gain >= 0.0:
            raise OptionError(
                "opt_tree: min_gain must be at least 0 (0 grows to the full "
                f"depth); got {self.min_gain}"
            )

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        before = self._expected(tree, plan)
        following = BestFirst.expand(self, tree, frontier, laws, plan, draws)
        return following if self._expected(tree, plan) - before >= self.min_gain else ()

    def _expected(self, tree: GrowingTree, plan: DraftPlan) -> float:
        return math.fsum(sorted(tree.path_probs[1:], reverse=True)[: plan.nodes(self.num_nodes)])


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
        check_bounds("threshold", depth=self.depth, width=self.width, num_nodes=self.num_nodes)
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
                mass = law_of[node].prob(tree.token_ids[child])
                tree.path_probs[child] = tree.path_probs[node] * mass
                # The first candidate of a node is worth its path: below the threshold there is none.
                if tree.path_probs[child] >= self.min_prob:
                    following.append(child)
        return following if tree.depths[frontier[0]] + 1 < plan.depth(self.depth) else ()

    def _width(self, path_prob: float, law: Law) -> int:
        if way_of_drawing(self.children).proposes is Deterministic:
            return sum(path_prob * mass >= self.min_prob for _, mass in law.top_masses(self.width))
        q = law.sparse().probs
        fresh, width = q.clone(), 0
        while width < self.width and path_prob * float(fresh.sum()) >= self.min_prob:
            width += 1
            fresh = fresh * (1.0 - q)
        return width
