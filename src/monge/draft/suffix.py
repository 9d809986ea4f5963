"""Suffix decoding: propose a tree of the most frequent continuations of the last tokens."""

import math
from dataclasses import dataclass, field

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.proposal import Deterministic
from monge.core.tree import GrowingTree, TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, ModelFreeDrafter, model_free
from monge.draft.suffix_index import Continuations, Limits, SuffixIndex
from monge.draft.tree.base import check_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixDrafter(ModelFreeDrafter[SuffixIndex]):
    """A tree of the most frequent continuations in this text and earlier requests.

    Each match length proposes a tree. Its nodes are continuations, best first by their share of the
    occurrences, at most `nodes_per_token` for every matched token. The tree with the largest sum of
    shares is drafted. The
    candidates are a function of committed text (`Deterministic`).

    Args:
        num_nodes: Most drafted nodes.
        depth: Deepest node.
        width: Most candidates of a node; 1 drafts chains, for targets that cannot read trees.
        max_match: Longest match, in tokens.
        nodes_per_token: Drafted nodes for each matched token, so that long matches give long
            drafts.
        min_share: Smallest share of the occurrences that a candidate must follow.
        max_history: Tokens of finished requests that are kept, newest first; 0 for none. One
            request then affects the speed of others, but never their text.

    Raises:
        OptionError: If a size is too small or a share is no probability.

    Reference:
        SuffixDecoding (Oliaro et al., arXiv 2411.04975); the statistics come from the occurrences
        themselves, at most 256 of an ending, instead of a suffix tree.
    """

    num_nodes: int = 16
    depth: int = 16
    width: int = 4
    max_match: int = 16
    nodes_per_token: float | int = 4.0
    min_share: float | int = 0.1
    max_history: int = 0
    _history: SuffixIndex = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_sizes(
            "suffix",
            num_nodes=self.num_nodes,
            depth=self.depth,
            width=self.width,
            max_match=self.max_match,
        )
        if (
            not self.nodes_per_token > 0.0
            or not 0.0 <= self.min_share <= 1.0
            or self.max_history < 0
        ):
            raise OptionError(
                "suffix: need nodes_per_token > 0, min_share in [0, 1] and max_history >= 0; got "
                f"{self.nodes_per_token}, {self.min_share} and {self.max_history}"
            )
        object.__setattr__(self, "_history", SuffixIndex(self.max_history))

    @property
    def capabilities(self) -> Capabilities:
        return model_free(max_depth=self.depth, max_width=min(self.width, self.num_nodes))

    def start(self, context: Context) -> SuffixIndex:
        index = SuffixIndex()
        index.extend(context.token_ids)
        return index

    def tree(
        self, context: Context, state: SuffixIndex, plan: DraftPlan, draws: Draws
    ) -> TokenTree:
        return _tree(context.token_ids[-1], self._best(context, state, plan), draws)

    def follow(self, context: Context, draft: Draft[SuffixIndex], verdict: Verdict) -> SuffixIndex:
        draft.state.extend(context.token_ids[len(draft.state) :])
        return draft.state

    def close(self, context: Context) -> None:
        if self.max_history > 0:
            self._history.extend(context.token_ids)
            self._history.end_text()

    def _best(self, context: Context, state: SuffixIndex, plan: DraftPlan) -> Continuations:
        ending = context.token_ids[-self.max_match :]
        budget, depth = plan.nodes(self.num_nodes), plan.depth(self.depth)
        trees = [
            index.continuations(places, self._limits(length, budget, depth))
            for index in (state, self._history)
            for length, places in index.matches(ending, self.max_match)
        ]
        return max(trees, key=lambda tree: tree.score, default=Continuations())

    def _limits(self, matched: int, budget: int, depth: int) -> Limits:
        earned = math.ceil(self.nodes_per_token * matched)
        return Limits(
            num_nodes=min(budget, earned) if depth > 0 else 0,
            depth=depth,
            width=self.width,
            min_share=float(self.min_share),
        )


def _tree(root: int, best: Continuations, draws: Draws) -> TokenTree:
    tree, node_of = GrowingTree(root), {-1: 0}
    children: dict[int, list[int]] = {}
    for position, parent in enumerate(best.parents):
        children.setdefault(parent, []).append(position)
    # Parents first: a position is listed after its parent.
    for parent, positions in children.items():
        tokens = tuple(best.token_ids[position] for position in positions)
        node_of.update(
            zip(positions, tree.grow(node_of[parent], Deterministic(tokens), draws), strict=True)
        )
    return tree.finish()
