"""Suffix decoding: propose a tree of the most frequent continuations of the last tokens."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.setting_types import check_bounds
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, ModelFreeDrafter, model_free
from monge.draft.text_history import Path, SuffixIndex, TextHistory, continuations
from monge.laws.draws import Draws
from monge.laws.proposal import Deterministic
from monge.laws.tree import GrowingTree, TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix(ModelFreeDrafter[SuffixIndex]):
    """A tree of the most frequent continuations in this text and earlier requests.

    Each match length proposes a tree. Its nodes are continuations, best first by their share of the
    occurrences, at most `nodes_per_token` for every matched token. The tree with the largest sum of
    shares is drafted: its expected accepted tokens, if the text continues like a random earlier
    occurrence. The candidates are a function of committed text (`Deterministic`).

    Args:
        num_nodes: Most drafted nodes.
        depth: Deepest node.
        width: Most candidates of a node; 1 drafts chains, for targets that cannot read trees.
        max_match: Longest match, in tokens.
        nodes_per_token: Drafted nodes for each matched token, so that long matches give long
            drafts.
        min_share: Smallest share of the occurrences that a candidate must follow.
        max_history: Tokens of earlier requests that are kept, newest first; 0 for none. Then
            requests of the same batch draft from each other as well, and those with equal prompts
            have an index of their own. A kept token takes about 24 bytes, and each token id that
            occurs in an index about 200 more. A request affects the speed of other requests, but
            never the distribution of their text.
        history: The kept texts; `None` makes a history for each decoder. Several decoders may use it in turn, if
            their targets have the same vocabulary.

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
    history: TextHistory | None = field(default=None, repr=False, compare=False)
    _kept: TextHistory | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bounds(
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
        kept = TextHistory() if self.history is None else self.history
        object.__setattr__(self, "_kept", kept if self.max_history > 0 else None)

    @property
    def capabilities(self) -> Capabilities:
        width = min(self.width, self.num_nodes)
        return model_free(
            max_depth=self.depth,
            max_width=width,
            max_nodes=self.num_nodes,
            reads_others=self.max_history > 0,
        )

    def start(self, context: Context) -> SuffixIndex:
        index = SuffixIndex()
        index.extend(context.token_ids)
        if self._kept is not None:
            self._kept.follow(context, self.max_match)
        return index

    def tree(
        self, context: Context, state: SuffixIndex, plan: DraftPlan, draws: Draws
    ) -> TokenTree:
        ending = context.token_ids[-self.max_match :]
        num_nodes, depth = plan.nodes(self.num_nodes), plan.depth(self.depth)
        kept, best, most = self._kept, dict[Path, float](), 0.0
        for index in (state, *(() if kept is None else kept.indexes(context))):
            for length, places in index.matches(ending, self.max_match):
                room = min(num_nodes, math.ceil(self.nodes_per_token * length))
                if min(room, depth) <= most:  # the shares of a depth sum to one at most
                    continue
                shares = continuations(
                    places,
                    num_nodes=room,
                    depth=depth,
                    width=self.width,
                    min_share=self.min_share,
                )
                if (total := math.fsum(shares.values())) > most:
                    best, most = shares, total
        return _tree(context.token_ids[-1], best, draws)

    def follow(self, context: Context, draft: Draft[SuffixIndex], verdict: Verdict) -> SuffixIndex:
        draft.state.extend(context.token_ids[draft.state.length() :])
        if self._kept is not None:
            self._kept.follow(context, self.max_match)
        return draft.state

    def close(self, context: Context) -> None:
        if self._kept is not None:
            self._kept.finish(context, self.max_match, self.max_history)


def _tree(root: int, paths: Iterable[Path], draws: Draws) -> TokenTree:
    """Return the tree of paths, each of which comes after its beginnings."""
    children: dict[Path, list[int]] = {}
    for path in paths:
        children.setdefault(path[:-1], []).append(path[-1])
    tree = GrowingTree(root)
    node_of: dict[Path, int] = {(): 0}
    for above, tokens in children.items():
        grown = tree.grow(node_of[above], Deterministic(tuple(tokens)), draws)
        node_of |= {(*above, token): node for token, node in zip(tokens, grown, strict=True)}
    return tree.finish()
