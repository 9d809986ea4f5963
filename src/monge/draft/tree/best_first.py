"""Trees of the most probable paths of the draft law."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.proposal import Deterministic
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.base import TreeBuilder, TreeLimits, check_sizes


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

    def __post_init__(self) -> None:
        check_sizes(
            "best_first",
            num_nodes=self.num_nodes,
            depth=self.depth,
            width=self.width,
            beam=self.beam,
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
        grown: list[int] = []
        for node, children in tree.grow_level(proposals, draws).items():
            for child, (_, mass) in zip(children, best[node], strict=True):
                tree.path_probs[child] = tree.path_probs[node] * mass
            grown.extend(children)
        if tree.depths[frontier[0]] + 1 >= plan.depth(self.depth):
            return ()
        # A node that is not among the best has no descendant among them: reading it would be
        # wasted.
        level = set(grown)
        return [node for node in self._best(tree, plan) if node in level][: self.beam]

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

    def __post_init__(self) -> None:
        check_sizes(
            "eagle2",
            num_nodes=self.num_nodes,
            depth=self.depth,
            width=self.width,
            beam=self.beam or self.width,
        )
        object.__setattr__(self, "beam", self.beam or self.width)


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
