"""Keys and values of texts, kept for later texts that begin alike."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol, runtime_checkable

from torch import Tensor

from monge.networks.base import SequenceModel

KeyValues = tuple[Tensor, ...]
"""All that a network keeps of a run of tokens. Tokens are the second-to-last dimension."""

_LEAST: Final = 16
"""Shorter beginnings cost as much to copy as to read."""


@runtime_checkable
class PrefixModel(SequenceModel, Protocol):
    """A network that can copy its state of committed tokens from a sequence to another."""

    @property
    def prefixes(self) -> "PrefixCache | None":
        """The cache in which `open`, and the first `append`, look up the beginning of a text; `None` reads every token."""
        ...

    @prefixes.setter
    def prefixes(self, prefixes: "PrefixCache | None") -> None: ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the cache keeps for each token; complete once a sequence was open."""
        ...

    @property
    def weights_version(self) -> int:
        """A number that changes whenever a change of the network is seen."""
        ...

    def is_complete(self, sequence: int) -> bool:
        """Return whether a sequence is open, with all that is kept of its committed tokens."""
        ...

    def save(self, sequence: int, start: int, stop: int) -> KeyValues:
        """Return a copy of the keys and values of these committed tokens."""
        ...

    def load(self, sequence: int, kept: Sequence[KeyValues]) -> None:
        """Fill an empty sequence with the keys and values of its first tokens, run after run, and commit them."""


@dataclass(slots=True, eq=False)
class _Edge:
    """A run of tokens that follows the run of another edge."""

    token_ids: tuple[Hashable, ...]
    kept: KeyValues
    above: "_Edge | None"
    below: dict[Hashable, "_Edge"] = field(default_factory=dict[Hashable, "_Edge"])
    """By their first token."""
    used: int = 0


@dataclass(slots=True, eq=False)
class _Tree:
    """The cached texts of a network."""

    model: PrefixModel
    bytes_per_token: int
    weights_version: int
    num_tokens: int = 0
    root: _Edge = field(default_factory=lambda: _Edge((), (), None))
    edges: set[_Edge] = field(default_factory=set[_Edge])


class PrefixCache:
    """A radix tree of texts for each network: texts share the edges of their common beginning.

    The cache keeps copies, so no sequence depends on another. The texts that were used least
    recently are dropped first, from their end. Only one thread at a time may use it.

    Texts of different salts share nothing, and a text of salt `None` is not kept. If the weights of
    a network change, its texts are dropped at its next lookup. Changes that `NetworkVersion` does
    not see need `clear`.

    Args:
        max_bytes: Most memory, of all networks.
        max_tokens: Returns the largest number of cached tokens for a network.
        min_tokens: Shorter beginnings are read again.

    Reference:
        RadixAttention of SGLang (Zheng et al., arXiv 2312.07104).
    """

    def __init__(
        self,
        *,
        max_bytes: float | int = math.inf,
        max_tokens: Callable[[], float | int] = lambda: math.inf,
        min_tokens: int = _LEAST,
    ) -> None:
        self._max_bytes, self._max_tokens, self._min_tokens = max_bytes, max_tokens, min_tokens
        self._trees: dict[SequenceModel, _Tree] = {}
        self.salts: dict[int, str | None] = {}
        """Salts of sequences, unless they are empty."""
        self._clock = count(1)

    @property
    def num_tokens(self) -> int:
        """Tokens of the network that has most in the cache; any thread may read it."""
        return max((tree.num_tokens for tree in tuple(self._trees.values())), default=0)

    @property
    def num_bytes(self) -> int:
        """Memory of all that is kept."""
        return sum(tree.num_tokens * tree.bytes_per_token for tree in self._trees.values())

    def length(self, model: SequenceModel, token_ids: Sequence[int], salt: str | None = "") -> int:
        """Return how many first tokens of a text are kept, and count them as used."""
        self._drop_stale(model)
        length = sum(size for _, size in self._path(model, _salted(token_ids, salt)))
        return length if length >= self._min_tokens else 0

    def unread(self, model: PrefixModel, sequence: int, token_ids: Sequence[int]) -> Sequence[int]:
        """Fill an empty sequence with the beginning of a text that is kept, and return the rest."""
        salt = self.salts.get(sequence, "")
        if model.length(sequence) or not (length := self.length(model, token_ids, salt)):
            return token_ids
        path = self._path(model, _salted(token_ids, salt))
        model.load(sequence, [_part(edge.kept, 0, size) for edge, size in path])
        return token_ids[length:]

    def keep(self, model: PrefixModel, sequence: int, token_ids: Sequence[int]) -> range:
        """Keep a text as far as a sequence holds it and there is room, if others have to go for it.

        Returns:
            Places of the tokens that were not kept before.
        """
        if not model.is_complete(sequence):
            return range(0)
        self._drop_stale(model)
        empty = _Tree(model, model.bytes_per_token, model.weights_version)
        tree = self._trees.setdefault(model, empty)
        text = _salted(token_ids, self.salts.get(sequence, ""))[: model.length(sequence)]
        path = self._path(model, text)
        start = sum(size for _, size in path)
        above, size = path[-1] if path else (tree.root, 0)
        if size < len(above.token_ids):
            above = _split(tree, above, size)
        stop = start + self._make_room(tree, len(text) - start, above)
        if stop > start:
            edge = _Edge(text[start:stop], model.save(sequence, start, stop), above)
            edge.used = next(self._clock)
            above.below[text[start]] = edge
            tree.edges.add(edge)
            tree.num_tokens += stop - start
        return range(start, stop)

    def trim(self) -> None:
        """Drop texts until the rest is within the limits."""
        for tree in self._trees.values():
            self._make_room(tree, 0, tree.root)

    def clear(self) -> None:
        """Drop all texts."""
        self._trees.clear()

    def _drop_stale(self, model: SequenceModel) -> None:
        """Drop what a network has computed with other weights."""
        tree = self._trees.get(model)
        if tree is not None and tree.weights_version != tree.model.weights_version:
            del self._trees[model]

    def _path(self, model: SequenceModel, text: tuple[Hashable, ...]) -> list[tuple[_Edge, int]]:
        """Return the edges that a text follows, and how many tokens of each."""
        tree, start, path = self._trees.get(model), 0, list[tuple[_Edge, int]]()
        edge, now = None if tree is None else tree.root, next(self._clock)
        while edge is not None and start < len(text):
            if (edge := edge.below.get(text[start])) is not None:
                size = _num_equal(edge.token_ids, text[start : start + len(edge.token_ids)])
                edge.used, start = now, start + size
                path.append((edge, size))
                edge = edge if size == len(edge.token_ids) else None
        return path

    def _make_room(self, tree: _Tree, wanted: int, above: _Edge) -> int:
        """Drop texts until `wanted` tokens fit after an edge; return how many fit."""
        while True:
            room, memory = self._max_tokens() - tree.num_tokens, math.inf
            if tree.bytes_per_token:
                memory = (self._max_bytes - self.num_bytes) / tree.bytes_per_token
            ends = _ends([tree], above) if wanted > room else []
            if not ends and min(wanted, room) > memory:
                ends = _ends(self._trees.values(), above)
            if not ends:
                return max(0, int(min(wanted, room, memory)))
            edge, owner = min(ends, key=lambda end: end[0].used)
            assert edge.above is not None, "the root is no edge"
            del edge.above.below[edge.token_ids[0]]
            owner.edges.remove(edge)
            owner.num_tokens -= len(edge.token_ids)


def _ends(trees: Iterable[_Tree], above: _Edge) -> list[tuple[_Edge, _Tree]]:
    """Return the edges that end texts, except for `above`."""
    edges = ((edge, tree) for tree in trees for edge in tree.edges)
    return [(edge, tree) for edge, tree in edges if not edge.below and edge is not above]


def _split(tree: _Tree, edge: _Edge, size: int) -> _Edge:
    """Split an edge into two copies, each of which can be dropped alone. Return the upper."""
    assert edge.above is not None, "the root has no tokens"
    upper, length = _Edge(edge.token_ids[:size], (), edge.above), len(edge.token_ids)
    upper.kept, lower = (
        tuple(states.clone() for states in _part(edge.kept, *ends))
        for ends in ((0, size), (size, length))
    )
    upper.used, upper.below = edge.used, {edge.token_ids[size]: edge}
    edge.above.below[edge.token_ids[0]] = upper
    edge.token_ids, edge.kept, edge.above = edge.token_ids[size:], lower, upper
    tree.edges.add(upper)
    return upper


def _part(kept: KeyValues, start: int, stop: int) -> KeyValues:
    return tuple(states[..., start:stop, :] for states in kept)


def _salted(token_ids: Sequence[int], salt: str | None) -> tuple[Hashable, ...]:
    """Return a text whose first token has the salt, so that it begins like texts of this salt only."""
    text = tuple(token_ids)
    return () if salt is None else ((salt, text[0]), *text[1:]) if salt and text else text


def _num_equal(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return how many first tokens are equal."""
    if one == other:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
