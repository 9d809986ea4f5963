"""Texts of earlier and of running requests, indexed for matches of their last tokens."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final

from monge.core.context import Context

Path = tuple[int, ...]
Place = tuple["array[int]", int]
"""A text and an offset in it."""

_MOST_OCCURRENCES: Final = 256
"""Most recent occurrences used per match; it bounds the time in text that repeats itself."""
_BITS: Final = 32
_OFFSET: Final = (1 << _BITS) - 1


class SuffixIndex:
    """An index of texts for matches of their last tokens, without a suffix tree.

    The texts may grow side by side, and each can be dropped. A token takes 4 bytes and its place 8;
    a token id that occurs takes about 200 more.
    """

    def __init__(self) -> None:
        self._texts: dict[int, array[int]] = {}
        # By token: text number and offset behind each occurrence, as one number, oldest first.
        self._occurrences: dict[int, array[int]] = {}

    def extend(self, token_ids: Sequence[int], text: int = 0) -> None:
        """Append to a text; an unknown number starts a new text."""
        tokens = self._texts.setdefault(text, array("i"))
        for place, token in enumerate(token_ids, start=(text << _BITS) + len(tokens) + 1):
            if (places := self._occurrences.get(token)) is None:
                places = self._occurrences[token] = array("q")
            elif len(places) >= 2 * _MOST_OCCURRENCES:
                del places[:_MOST_OCCURRENCES]
            places.append(place)
        tokens.extend(token_ids)

    def drop(self, text: int) -> None:
        """Forget a text."""
        for token in set(self._texts.pop(text, ())):
            before = self._occurrences.pop(token, ())
            if places := array("q", (place for place in before if place >> _BITS != text)):
                self._occurrences[token] = places

    def length(self, text: int = 0) -> int:
        """Return the number of tokens of a text."""
        return len(self._texts[text])

    @property
    def num_places(self) -> int:
        """Number of occurrences that are kept, over all tokens."""
        return sum(map(len, self._occurrences.values()))

    @property
    def is_empty(self) -> bool:
        """True if there is no text."""
        return not self._texts

    def matches(self, ending: Sequence[int], max_match: int) -> list[tuple[int, list[Place]]]:
        """Return the match lengths, longest first, each with the places after its occurrences.

        A shorter length is listed only if it occurs more often than the longer match.
        """
        matches: list[tuple[int, list[Place]]] = []
        recent = self._occurrences.get(ending[-1], array("q"))[-_MOST_OCCURRENCES:]
        places = [(self._texts[place >> _BITS], place & _OFFSET) for place in reversed(recent)]
        places = [(tokens, at) for tokens, at in places if at < len(tokens)]
        for length in range(1, min(max_match, len(ending)) + 1):
            if length > 1:
                before = ending[-length]
                places = [
                    (tokens, at)
                    for tokens, at in places
                    if at >= length and tokens[at - length] == before
                ]
            if not places:
                break
            if matches and len(matches[-1][1]) == len(places):
                matches.pop()
            matches.append((length, places))
        return matches[::-1]


def continuations(
    places: Sequence[Place], *, num_nodes: int, depth: int, width: int, min_share: float
) -> dict[Path, float]:
    """Return the most frequent continuations at some places, best first, ties by recency.

    Every path comes after its beginnings.

    Args:
        places: Places after the occurrences.
        num_nodes: Most paths.
        depth: Longest path.
        width: Most continuations of a path.
        min_share: Smallest share of the occurrences that a path must follow.

    Returns:
        The share of the occurrences that follow each path.
    """
    shares: dict[Path, float] = {}
    order = count()
    queue: list[tuple[float, int, Path, list[Place]]] = []  # -share, order, path, places after

    def look(at: Sequence[Place], path: Path) -> None:
        following: dict[int, list[Place]] = {}
        for tokens, offset in at:
            if offset < len(tokens):
                following.setdefault(tokens[offset], []).append((tokens, offset + 1))
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


@dataclass(slots=True)
class _Text:
    """A text of the history.

    Args:
        number: Its number in the indexes.
        group: Key of the requests with its prompt.
        start: First token of its request that is indexed.
        stop: Place after the last indexed token.
    """

    number: int
    group: int
    start: int
    stop: int


class TextHistory:
    """Texts of finished requests, the oldest dropped first, and those of running requests.

    Requests with equal prompts are a group, whose texts have an index of their own: newer texts of
    other prompts do not displace an old text of the same prompt. A group keeps its prompt once.
    """

    def __init__(self) -> None:
        self._every, self._groups = SuffixIndex(), dict[int, SuffixIndex]()
        self._running = dict[int, _Text]()  # by request
        self._finished, self._numbers = deque[_Text](), count()
        self._num_kept = 0

    def __len__(self) -> int:
        """Tokens of finished requests."""
        return self._num_kept

    def indexes(self, context: Context) -> tuple[SuffixIndex, SuffixIndex]:
        """Return the index of a running request's group, and that of all texts."""
        return self._groups[self._running[context.request_id].group], self._every

    def follow(self, context: Context, max_match: int) -> None:
        """Index what is new in the text of a request.

        Args:
            context: The request.
            max_match: Tokens before a completion that its group indexes with it.
        """
        token_ids, size = context.token_ids, context.num_prompt_tokens
        lead = max(0, size - max_match)
        text = self._running.get(context.request_id)
        if text is None:
            # Prompts of equal hashes would share drafts, which are verified.
            key = hash(token_ids[:size])
            start = lead if key in self._groups else 0
            text = _Text(next(self._numbers), key, start, start)
            self._running[context.request_id] = text
        self._every.extend(token_ids[text.stop :], text.number)
        group = self._groups.setdefault(text.group, SuffixIndex())
        group.extend(token_ids[max(text.stop, lead) :], text.number)
        text.stop = len(token_ids)

    def finish(self, context: Context, max_match: int, max_tokens: int) -> None:
        """Keep the text of a request that has ended, and drop the oldest texts beyond `max_tokens`."""
        self.follow(context, max_match)
        text = self._running.pop(context.request_id)
        self._finished.append(text)
        self._num_kept += text.stop - text.start
        while self._num_kept > max_tokens:
            oldest = self._finished.popleft()
            self._num_kept -= oldest.stop - oldest.start
            group = self._groups[oldest.group]
            self._every.drop(oldest.number)
            group.drop(oldest.number)
            if group.is_empty:
                del self._groups[oldest.group]
