"""Levels of trees that are drawn as tensors, without a wait of the host in between.

Draws are functions of uniforms, so these are the draws of the objects: `Proposal.draw` with the same
numbers gives the same tokens as `Proposal.draw_rows`, up to rounding of running sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import probs_from_logits, rule_rows
from monge.laws.law import Law, one_hot, sparse_part, trusted_law
from monge.laws.proposal import DrawRows, Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShape:
    """Trees in which all nodes of a depth have the same number of children.

    Args:
        widths: Children of every node, from the root downwards.
        kind: How children are drawn. Where tokens may repeat, the objects draw levels of several
            children per node, since a repeated token is a single node.
    """

    widths: tuple[int, ...]
    kind: type[Proposal]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of every level below the root."""
        return tuple(accumulate(self.widths, mul))

    @property
    def num_read(self) -> int:
        """Nodes below the root that a network reads: all but those of the last level."""
        return sum(self.sizes[:-1])

    def parents(self, level: int) -> tuple[int, ...]:
        """Return the parent of every node of a level, counted among the drafted nodes; the root is -1."""
        if level == 0:
            return (-1,) * self.widths[0]
        first = sum(self.sizes[: level - 1])
        return tuple(first + node // self.widths[level] for node in range(self.sizes[level]))


@lru_cache(maxsize=256)
def relatives(shape: LevelShape) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return parent and children of every node, the root being node 0."""
    levels = range(len(shape.widths))
    parents = (-1, *(1 + parent for level in levels for parent in shape.parents(level)))
    children = list[list[int]]([] for _ in parents)
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    return parents, tuple(map(tuple, children))


DrawnTree = tuple[Sequence[int], Sequence[Law]]
"""Tokens of a tree below its root, and the draft laws of its nodes with children, both level by level.

A token is -1 where a law is not finite or has too few tokens; the tokens below that node have no meaning."""


@dataclass(frozen=True, slots=True, eq=False)
class RootDraws:
    """Inputs from which the trees of several requests are drawn, by request.

    Args:
        logits: Logits at the roots.
        uniforms: A uniform per node, level by level; not read at temperature 0.
        rules: How logits become draft laws; all are greedy, or none.
        shape: Shape of the trees.
        draft_ids: The tokens that logits are about, ascending; `None` for all.
    """

    logits: Mapping[int, Float[Tensor, "one vocab"]]
    uniforms: Mapping[int, Sequence[float]]
    rules: Mapping[int, SamplingRules]
    shape: LevelShape
    draft_ids: Int64[Tensor, " vocab"] | None

    def rows(self, requests: Sequence[int]) -> "LevelDraws":
        """Return the same row by row, for requests in this order."""
        roots = torch.stack([self.logits[request] for request in requests])
        uniforms = torch.tensor(
            [self.uniforms[request] for request in requests], dtype=torch.float64
        )
        rules = [self.rules[request] for request in requests]
        positions = uniforms.to(roots.device, non_blocking=True)
        return LevelDraws(roots, positions, self.shape, rules, self.draft_ids)


@dataclass(frozen=True, slots=True, eq=False)
class LevelDraws:
    """Inputs from which trees are drawn, tree by tree; see `RootDraws`."""

    logits: Float[Tensor, "trees one vocab"]
    uniforms: Float64[Tensor, "trees nodes"]
    shape: LevelShape
    rules: Sequence[SamplingRules]
    draft_ids: Int64[Tensor, " vocab"] | None = None


class DrawnLevels(NamedTuple):
    """Drawn trees, level by level.

    Attributes:
        token_ids: Tokens below the roots; -1 where a law is not finite or has too few tokens.
        probs: Draft laws of the nodes with children; `None` at temperature 0, where they are point
            masses.
    """

    token_ids: Int64[Tensor, "trees nodes"]
    probs: Float64[Tensor, "trees inner vocab"] | None


ReadLevel = Callable[[Int64[Tensor, "trees level"], int], Float[Tensor, "trees level vocab"]]
"""Reads the nodes of a level, counted from 0, and returns their logits."""


def draw_level(
    logits: Float[Tensor, "trees nodes vocab"],
    probs: Float64[Tensor, "trees nodes vocab"] | None,
    uniforms: Float64[Tensor, "trees level"],
    draw: DrawRows,
    draft_ids: Int64[Tensor, " vocab"] | None,
) -> Int64[Tensor, "trees level"]:
    """Draw the children of all nodes of a level, as many of each node.

    Args:
        logits: Logits at the nodes.
        probs: Draft laws of the nodes; `None` at temperature 0, where the most probable token is drawn.
        uniforms: A uniform per child.
        draw: See `Proposal.draw_rows`.
        draft_ids: The tokens that logits are about, ascending; `None` for all.

    Returns:
        Tokens; -1 where a law is not finite or has too few tokens.
    """
    if probs is None:
        largest, best = logits.max(-1)
        places = torch.where(largest.isfinite(), best, -1)
    else:
        rows = probs.flatten(0, 1)
        places = draw(rows, uniforms.reshape(len(rows), -1)).view(len(logits), -1)
    if draft_ids is None:
        return places
    return torch.where(places < 0, -1, draft_ids[places.clamp_min(0)])


def draw_levels(given: LevelDraws, read: ReadLevel) -> DrawnLevels:
    """Draw trees level by level; the network reads every level but the last.

    Args:
        given: What they are drawn from.
        read: Reads a level.
    """
    logits, shape, draft_ids = given.logits, given.shape, given.draft_ids
    token_ids, laws, first = list[Tensor](), list[Tensor](), 0
    is_greedy, rules = given.rules[0].temperature == 0, rule_rows(given.rules, logits)
    for level, size in enumerate(shape.sizes):
        probs = None if is_greedy else probs_from_logits(logits, rules)
        laws += [] if probs is None else [probs]
        draw, positions = shape.kind.draw_rows, given.uniforms[:, first : first + size]
        assert draw is not None, "`LevelTree` asks first"
        drawn = draw_level(logits, probs, positions, draw, draft_ids)
        token_ids.append(drawn)
        first += size
        if level + 1 < len(shape.widths):
            # What is drawn below a node without a token is not read.
            logits = read(drawn.clamp_min(0), level)
    return DrawnLevels(torch.cat(token_ids, 1), torch.cat(laws, 1) if laws else None)


class DrawnTrees:
    """Trees that a device draws, by request. The host waits for their tokens when they are first read.

    Args:
        requests: The requests, row by row.
        drawn: Their trees.
        draft_ids: The tokens that laws are about, ascending; `None` for all.
    """

    def __init__(
        self, requests: Sequence[int], drawn: DrawnLevels, draft_ids: Int64[Tensor, " vocab"] | None
    ) -> None:
        self._rows = {request: row for row, request in enumerate(requests)}
        self._drawn, self._draft_ids = drawn, draft_ids
        self._tokens, self._is_copied = drawn.token_ids, None
        if drawn.token_ids.is_cuda:
            # Begun now: behind the target's forward the host would wait for that as well.
            self._tokens = drawn.token_ids.to("cpu", non_blocking=True)
            self._is_copied = torch.cuda.Event()
            self._is_copied.record()

    def drawn_ids(self, request: int) -> Int64[Tensor, " nodes"]:
        """Return the tokens of a tree on the device."""
        return self._drawn.token_ids[self._rows[request]]

    def __getitem__(self, request: int) -> DrawnTree:
        if self._is_copied is not None:
            self._is_copied.synchronize()
        row, (token_ids, probs) = self._rows[request], self._drawn
        tokens = self._known[row]
        laws: list[Law]
        if probs is None:
            laws = [one_hot(token, token_ids.device) for token in tokens]
        elif self._draft_ids is None:
            laws = [*map(trusted_law, probs[row])]
        else:
            # Tokens that the rules cut keep mass zero: to leave them out, the host would wait.
            laws = [sparse_part(self._draft_ids, masses) for masses in probs[row]]
        return tokens, laws

    @cached_property
    def _known(self) -> list[list[int]]:
        return self._tokens.tolist()
