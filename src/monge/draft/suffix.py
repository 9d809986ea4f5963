"""Suffix decoding: propose a tree of the most frequent continuations of the last tokens."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.setting_types import check_bounds
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, ModelFreeDrafter, model_free
from monge.draft.tree_of_paths import Path, tree_of_paths

_MOST_OCCURRENCES: Final = 256
"""Most recent occurrences used per match; it bounds the time in text that repeats itself."""
_END: Final = -1
"""Separates texts; no token has this id, so no match crosses it."""


class SuffixIndex:
    """An index of texts for matches of their last tokens, without a suffix tree; it drops the oldest texts first.

    Args:
        max_tokens: Most tokens kept; `None` for all.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self._tokens: list[int] = []
        self._occurrences: dict[int, deque[int]] = {}
        self._first = 0  # tokens before this position are dropped
        self._max_tokens = max_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the current text."""
        for token in token_ids:
            places = self._occurrences.setdefault(token, deque(maxlen=_MOST_OCCURRENCES))
            places.append(len(self._tokens))
            self._tokens.append(token)

    def end_text(self) -> None:
        """Start a text, and drop the oldest texts beyond the limit."""
        self._tokens.append(_END)
        if self._max_tokens is None:
            return
        while len(self) > self._max_tokens:
            self._first = self._tokens.index(_END, self._first) + 1
        # Renumbering costs as much as was forgotten since the last time.
        if self._first > self._max_tokens:
            kept, self._first = self._tokens[self._first :], 0
            self._tokens, self._occurrences = [], {}
            self.extend(kept)
            self._occurrences.pop(_END, None)

    def __len__(self) -> int:
        return len(self._tokens) - self._first

    def matches(self, ending: Sequence[int], max_match: int) -> list[tuple[int, list[int]]]:
        """Return the match lengths, longest first, each with the positions after its occurrences.

        A shorter length is listed only if it occurs more often than the longer one.
        """
        tokens, first = self._tokens, self._first
        matches: list[tuple[int, list[int]]] = []
        places = [place + 1 for place in reversed(self._occurrences.get(ending[-1], ()))]
        places = [
            place for place in places if first < place < len(tokens) and tokens[place] != _END
        ]
        for length in range(1, min(max_match, len(ending)) + 1):
            if length > 1:
                before = ending[-length]
                places = [p for p in places if p - length >= first and tokens[p - length] == before]
            if not places:
                break
            if matches and len(matches[-1][1]) == len(places):
                matches.pop()
            matches.append((length, places))
        return matches[::-1]

    def continuations(
        self, places: Sequence[int], *, num_nodes: int, depth: int, width: int, min_share: float
    ) -> dict[Path, float]:
        """Return the most frequent continuations at some positions, best first, ties by recency.

        Every path comes after its beginnings.

        Args:
            places: Positions after the occurrences.
            num_nodes: Most paths.
            depth: Longest path.
            width: Most continuations of a path.
            min_share: Smallest share of the occurrences that a path must follow.

        Returns:
            The share of the occurrences that follow each path.
        """
        shares: dict[Path, float] = {}
        order = count()
        queue: list[tuple[float, int, Path, list[int]]] = []  # -share, order, path, places after

        def look(at: Sequence[int], path: Path) -> None:
            following: dict[int, list[int]] = {}
            for place in at:
                if place < len(self._tokens) and self._tokens[place] != _END:
                    following.setdefault(self._tokens[place], []).append(place + 1)
            # Stable: recent ones first.
            likeliest = sorted(following.items(), key=lambda item: -len(item[1]))[:width]
            for token, after in likeliest:
                share = len(after) / len(places)
                heappush(queue, (-share, next(order), (*path, token), after))

        look(places, ())
        while queue and len(shares) < num_nodes:
            share, _, path, after = heappop(queue)
            if -share < min_share:
                break
            shares[path] = -share
            if len(path) < depth:
                look(after, path)
        return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixDrafter(ModelFreeDrafter[SuffixIndex]):
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
        object.__setattr__(self, "_history", SuffixIndex(self.max_history))

    @property
    def capabilities(self) -> Capabilities:
        width = min(self.width, self.num_nodes)
        return model_free(max_depth=self.depth, max_width=width, max_nodes=self.num_nodes)

    def start(self, context: Context) -> SuffixIndex:
        index = SuffixIndex()
        index.extend(context.token_ids)
        return index

    def tree(
        self, context: Context, state: SuffixIndex, plan: DraftPlan, draws: Draws
    ) -> TokenTree:
        ending = context.token_ids[-self.max_match :]
        num_nodes, depth = plan.nodes(self.num_nodes), plan.depth(self.depth)
        trees = [
            index.continuations(
                places,
                num_nodes=min(num_nodes, math.ceil(self.nodes_per_token * length)),
                depth=depth,
                width=self.width,
                min_share=self.min_share,
            )
            for index in (state, self._history)
            for length, places in index.matches(ending, self.max_match)
        ]
        best = max(trees, key=lambda shares: math.fsum(shares.values()), default={})
        return tree_of_paths(
            context.token_ids[-1], best, num_nodes=num_nodes, depth=depth, draws=draws
        )

    def follow(self, context: Context, draft: Draft[SuffixIndex], verdict: Verdict) -> SuffixIndex:
        draft.state.extend(context.token_ids[len(draft.state) :])
        return draft.state

    def close(self, context: Context) -> None:
        if self.max_history > 0:
            self._history.extend(context.token_ids)
            self._history.end_text()
