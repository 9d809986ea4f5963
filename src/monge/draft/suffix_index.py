"""Earlier occurrences of the last tokens and their continuations, without a suffix tree."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final

MOST_OCCURRENCES: Final = 256
"""Most recent occurrences used per match; it bounds the time in text that repeats itself."""

_END: Final = -1
"""Separates texts; no token has this id, so no match crosses it."""


@dataclass(frozen=True, slots=True)
class Continuations:
    """A tree of continuations.

    Args:
        token_ids: Token of every node, parents first.
        parents: Parent of every node; -1 for the first level.
        shares: For each node, the share of the occurrences that its path follows.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """Expected accepted tokens, if the text continues like a random earlier occurrence."""
        return math.fsum(self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tree of continuations.

    Args:
        num_nodes: Most nodes.
        depth: Deepest node.
        width: Most children of a node.
        min_share: Smallest share of the occurrences that a node's path must follow.
    """

    num_nodes: int
    depth: int
    width: int
    min_share: float


class SuffixIndex:
    """An index of texts for matches of their last tokens; it drops the oldest texts first.

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
            self._occurrences.setdefault(token, deque(maxlen=MOST_OCCURRENCES)).append(len(self._tokens))
            self._tokens.append(token)

    def end_text(self) -> None:
        """Start another text, and drop the oldest ones beyond the limit."""
        self._tokens.append(_END)
        if self._max_tokens is None:
            return
        while len(self._tokens) - self._first > self._max_tokens:
            self._first = self._tokens.index(_END, self._first) + 1
        if self._first > self._max_tokens:  # renumbering costs as much as was forgotten since the last time
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
        last, num_known = len(self._tokens), len(ending)
        places = [place + 1 for place in reversed(self._occurrences.get(ending[-1], ())) if place >= self._first]
        places = [place for place in places if place < last and self._tokens[place] != _END]
        found: list[tuple[int, list[int]]] = []
        length = 1
        while places and length <= min(max_match, num_known):
            if found and len(found[-1][1]) == len(places):
                found.pop()
            found.append((length, places))
            if length == num_known:
                break
            before = ending[-length - 1]
            places = [p for p in places if p - length - 1 >= self._first and self._tokens[p - length - 1] == before]
            length += 1
        return found[::-1]

    def continuations(self, places: Sequence[int], limits: Limits) -> Continuations:
        """Return the most frequent continuations at some positions, best first, ties by recency."""
        token_ids, parents, shares = list[int](), list[int](), list[float]()
        order = count()
        queue: list[tuple[float, int, int, int, int, list[int]]] = []  # (-share, order, parent, level, token, places after)

        def look(at: Sequence[int], parent: int, level: int) -> None:
            following: dict[int, list[int]] = {}
            for place in at:
                if place < len(self._tokens) and self._tokens[place] != _END:
                    following.setdefault(self._tokens[place], []).append(place + 1)
            likeliest = sorted(following.items(), key=lambda item: -len(item[1]))[: limits.width]  # stable: recent ones first
            for token, after in likeliest:
                heappush(queue, (-len(after) / len(places), next(order), parent, level, token, after))

        look(places, -1, 1)
        while queue and len(token_ids) < limits.num_nodes:
            share, _, parent, level, token, after = heappop(queue)
            if -share < limits.min_share:
                break
            token_ids.append(token)
            parents.append(parent)
            shares.append(-share)
            if level < limits.depth:
                look(after, len(token_ids) - 1, level + 1)
        return Continuations(tuple(token_ids), tuple(parents), tuple(shares))
