"""Trees that are wide and deep where the draft law says that it pays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from monge.core.context import DraftPlan
from monge.core.setting_types import check_bounds
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.proposal import Deterministic
from monge.laws.tree import GrowingTree, TokenTree


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
        depth: Deepest node; a forward of the draft model per level.
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
