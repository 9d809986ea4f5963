"""Systematic draws: one position in [0, 1] decides all candidates of a node (q = draft law, K = width)."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import torch

from monge.core.draws import Draws
from monge.core.errors import OptionError, unknown_name
from monge.core.law import Law, SparseLaw
from monge.core.proposal import Proposal, check_width

LAYOUTS: Final = ("least_full", "snake")
"""Ways to deal tokens to the bins, most probable first: to the least full bin, or in rows that turn at their ends."""

_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0
_SILVER: Final = math.sqrt(2.0) - 1.0
"""Steps of the scattered order; bins that all begin with their most probable tokens would offer these at once."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The joint law of candidates that change one at a time along [0, 1].

    Args:
        candidates: Distinct candidates in every cell, in a fixed order. No two cells have the same
            ones; the cells of a token are neighbours.
        lengths: Length of every cell; positive, summing to one.
    """

    candidates: tuple[tuple[int, ...], ...]
    lengths: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystematicDesign:
    """The cells of q: inclusion probabilities, bins, and an order in every bin.

    Token i is to be offered with probability pi_i proportional to q_i^exponent, capped at one, such
    that they sum to K. Tokens with pi_i = 1 are always offered. The others are dealt to as many
    bins as candidates are left; each bin is stretched to [0, 1], which shifts pi as far as the bins
    are unequal, and the position picks one token of every bin. Nothing here looks at p, so every
    choice is lossless; the choices only decide how often a candidate is accepted.

    Args:
        exponent: Above 0; below 1 it offers improbable tokens more often than q does.
        layout: One of `LAYOUTS`.
        top: Only so many of the most probable tokens are ever offered; `None` takes them all.
    """

    exponent: float | int = 0.9
    layout: str = "least_full"
    top: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.exponent) and self.exponent > 0):
            raise OptionError(
                f"systematic: exponent must be finite and above 0; got {self.exponent}"
            )
        if self.layout not in LAYOUTS:
            raise unknown_name("layout of systematic draws", self.layout, LAYOUTS)
        if self.top is not None and self.top < 1:
            raise OptionError(
                "systematic: top must be at least 1, or None for every token of "
                f"the draft law; got {self.top}"
            )

    def cells(self, law: Law, width: int) -> Cells:
        """Return the cells of `width` candidates from a draft law, or of fewer if it has fewer tokens."""
        count = law.sparse().probs.numel() if self.top is None else self.top
        ranked = law.top_masses(count)
        # Relative to the largest, which stays one: a large exponent may drop tokens, never all of
        # them.
        weights = [(mass / ranked[0][1]) ** self.exponent for _, mass in ranked]
        weights = [weight for weight in weights if weight > 0.0]
        tokens = [token for token, _ in ranked[: len(weights)]]
        num_fixed = _num_always(weights, width)
        fixed = tuple(tokens[:num_fixed])
        num_bins = min(width, len(tokens)) - num_fixed
        if num_bins == 0:
            return Cells((fixed,), (1.0,))
        deal = _least_full if self.layout == "least_full" else _snake
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        for index, row in zip(
            range(num_fixed, len(tokens)), deal(weights[num_fixed:], num_bins), strict=True
        ):
            bins[row].append(index)
        bins = [
            [indices[place] for place in _scattered(len(indices), row)]
            for row, indices in enumerate(bins)
        ]
        return _cut(
            fixed,
            [[tokens[i] for i in indices] for indices in bins],
            [[weights[i] for i in indices] for indices in bins],
        )


def _num_always(weights: Sequence[float], width: int) -> int:
    """Return the number of tokens with inclusion probability one; weights are decreasing."""
    rest = list(accumulate(reversed(weights)))[::-1]
    count = 0
    while count < min(width, len(weights)) and (width - count) * weights[count] >= rest[count]:
        count += 1
    return count


def _least_full(weights: Sequence[float], num_bins: int) -> list[int]:
    loads = [(0.0, index) for index in range(num_bins)]
    dealt: list[int] = []
    for weight in weights:
        load, index = loads[0]
        dealt.append(index)
        heapq.heapreplace(loads, (load + weight, index))
    return dealt


def _snake(weights: Sequence[float], num_bins: int) -> list[int]:
    there_and_back = [*range(num_bins), *reversed(range(num_bins))]
    return [there_and_back[rank % len(there_and_back)] for rank in range(len(weights))]


def _scattered(size: int, row: int) -> list[int]:
    """An order that mixes probable and improbable tokens, another one in every bin, and the same for equal sizes."""
    return sorted(range(size), key=lambda place: ((place + 1) * _GOLDEN + row * _SILVER) % 1.0)


def _cut(
    fixed: tuple[int, ...], tokens: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]
) -> Cells:
    """Lay the tokens of every bin side by side on [0, 1] and cut where one of them ends."""
    stops: list[list[float]] = []
    for row in weights:
        sums = list(accumulate(row))
        stops.append([*(total / sums[-1] for total in sums[:-1]), 1.0])
    edges = sorted({0.0}.union(*stops))
    at = [0] * len(tokens)
    candidates: list[tuple[int, ...]] = []
    for start in edges[:-1]:
        for row, ends in enumerate(stops):
            while ends[at[row]] <= start:
                at[row] += 1
        candidates.append(fixed + tuple(tokens[row][at[row]] for row in range(len(tokens))))
    return Cells(tuple(candidates), tuple(stop - start for start, stop in pairwise(edges)))


@dataclass(frozen=True, slots=True)
class Systematic(Proposal):
    """Distinct candidates decided by one position in [0, 1], drawn as the cell that it falls into.

    Args:
        law: q.
        width: K; fewer candidates where q has fewer tokens.
        design: Construction of the cells.

    Reference:
        Systematic sampling with unequal probabilities, of survey statistics; as a way of drafting,
        own construction, novelty not established.
    """

    law: Law
    width: int
    design: SystematicDesign = SystematicDesign()
    cells: Cells = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_width("Systematic", self.width)
        object.__setattr__(self, "cells", self.design.cells(self.law, self.width))

    def draw(self, draws: Draws) -> tuple[int, ...]:
        lengths = torch.tensor(self.cells.lengths, dtype=torch.float64)
        return self.cells.candidates[
            draws.categorical(SparseLaw(torch.arange(lengths.numel()), lengths))
        ]
