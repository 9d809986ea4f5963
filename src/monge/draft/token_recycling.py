"""Token recycling: propose the tokens that the target last ranked highest after the same token."""

from dataclasses import dataclass, field
from itertools import pairwise

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.proposal import Deterministic
from monge.core.setting_types import check_bounds
from monge.core.tree import GrowingTree, TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, ModelFreeDrafter, model_free
from monge.draft.tree.sequoia import Shape, best_shape, check_acceptance

Successors = dict[int, tuple[int, ...]]
"""For every seen token, its likely successors, most probable first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecyclingDrafter(ModelFreeDrafter[Successors]):
    """A tree of the tokens that the target ranked highest in earlier rounds, each after its parent's token.

    A table has the last known successors of every token. At first they come from the prompt. After
    a round, the target's ranking at every node of the tree, rejected nodes included, replaces the
    row of the node's token; the nodes on the text come last. The tree has the shape with the most
    expected tokens for the given chances of the first, second, ... successor. Candidates are a
    function of finished rounds (`Deterministic`).

    Args:
        num_nodes: Most drafted nodes.
        depth: Deepest node.
        acceptance: Chance that the first, second, .. successor is the accepted one; its length is
            the table's width.
        keep: Whether requests share one table. One request then affects the speed of others, but
            never their text.

    Raises:
        OptionError: If a size is too small, or a chance is no probability.

    Reference:
        Token Recycling (Luo et al., arXiv 2408.08696); the tree's shape is computed (Sequoia, arXiv
        2402.12374) instead of tuned by hand, and the prompt's own successions fill the table first.
    """

    num_nodes: int = 24
    depth: int = 6
    acceptance: tuple[float | int, ...] = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)
    keep: bool = False
    _shared: Successors = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bounds("token_recycling", num_nodes=self.num_nodes, depth=self.depth)
        check_acceptance("token_recycling", self.acceptance)

    @property
    def capabilities(self) -> Capabilities:
        shape = self._shape(self.num_nodes, self.depth)
        return model_free(
            max_depth=shape.depth,
            max_width=shape.width,
            max_nodes=self.num_nodes,
            num_successors=len(self.acceptance),
            reads_others=self.keep,
        )

    def start(self, context: Context) -> Successors:
        table = self._shared if self.keep else Successors()
        for token, follower in pairwise(context.token_ids):
            others = (other for other in table.get(token, ()) if other != follower)
            table[token] = (follower, *others)[: len(self.acceptance)]
        return table

    def tree(self, context: Context, state: Successors, plan: DraftPlan, draws: Draws) -> TokenTree:
        shape = self._shape(plan.nodes(self.num_nodes), plan.depth(self.depth))
        return _tree(context.token_ids[-1], shape, state, draws)

    def follow(self, context: Context, draft: Draft[Successors], verdict: Verdict) -> Successors:
        tree, text = draft.tree, (0, *verdict.path)
        # The nodes on the text come last, so that their rankings stay.
        for node in (*(node for node in range(tree.num_nodes) if node not in text), *text):
            ranked = verdict.successors[node][: len(self.acceptance)]
            draft.state[tree.token_ids[node]] = tuple(ranked)
        return draft.state

    def _shape(self, num_nodes: int, depth: int) -> Shape:
        return best_shape(num_nodes, depth, tuple(float(chance) for chance in self.acceptance))


def _tree(root: int, shape: Shape, table: Successors, draws: Draws) -> TokenTree:
    tree, level = GrowingTree(root), [(0, shape)]
    while level:
        below: list[tuple[int, Shape]] = []
        for node, subtree in level:
            tokens = table.get(tree.token_ids[node], ())[: len(subtree.children)]
            if tokens:
                grown = tree.grow(node, Deterministic(tokens), draws)
                # A short row leaves the last subtrees out.
                below.extend(zip(grown, subtree.children, strict=False))
        level = below
    return tree.finish()
