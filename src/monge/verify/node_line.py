"""The line of a node on the host: laws in, decisions out.

p = target (sub-)law, q = draft law, K = number of draws. A node has some tens of tokens and a few
draws, so an operation on a vector costs little more than its call. The line is therefore built with
numpy, and each draw is handled as plain numbers. This takes a tenth of the time that
`verify/functional/lines.py` takes for a row. That module has the theory, decides batches on a
device, and rounds alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float64, Int64

from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.lazy_laws import below, stable_order
from monge.verify.flow import Flow
from monge.verify.functional.lines import SMALLEST_MASS, STEPS
from monge.verify.problem import NodeProblem

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeLine:
    """The line of a node; fields are a row of those of `Lines`, and the tokens in the order of the line."""

    width: int
    floor: float
    masses: Float64[np.ndarray, " support"]
    tokens: Int64[np.ndarray, " placed"]
    reaches: Float64[np.ndarray, " edges"]
    borders: Float64[np.ndarray, " borders"]
    gains: Float64[np.ndarray, " windows"]
    heights: Float64[np.ndarray, " borders"]

    @classmethod
    def build(
        cls, p: Float64[np.ndarray, " support"], q: Float64[np.ndarray, " support"], width: int
    ) -> "NodeLine":
        """The line of a target, scaled for a sub-target and zero on deterministic candidates, and of a draft law."""
        has_place = q > SMALLEST_MASS
        placed = None if bool(has_place.all()) else np.flatnonzero(has_place)
        ratios = p / q if placed is None else p[placed] / q[placed]
        order = stable_order(np.ascontiguousarray(ratios))
        tokens, ratios = order if placed is None else placed[order], ratios[order]
        kept, drawn = p[tokens], q[tokens]
        before = _running(kept)
        reaches = np.concatenate(((0.0,), _running(drawn)))
        reaches /= reaches[-1]
        missed = max(0.0, float((_powers(reaches[1:], width)[2] - before).max()))
        others = _running(drawn[::-1].copy())[::-1]
        ceiling = max(
            0.0, float(np.minimum((1.0 - missed - (before - kept)) / others, ratios).max())
        )
        floor = _root(missed, width)
        split = int(np.searchsorted(reaches, floor))
        gains = np.minimum(ratios, ceiling)
        borders = np.concatenate((reaches[:split], (floor,), reaches[split:]))
        # W0 splits a window, or starts the first.
        gains = np.concatenate((gains[: max(split, 1)], gains[max(split, 1) - 1 :]))
        received = np.concatenate(((0.0,), _running((borders[1:] - borders[:-1]) * gains)))
        masses = np.minimum(p, ceiling * q)
        if placed is not None:
            masses[~has_place] = 0.0
        return cls(
            width=width,
            floor=floor,
            masses=masses,
            tokens=tokens,
            reaches=reaches,
            borders=borders,
            gains=gains,
            heights=received - np.maximum(_powers(borders, width)[2] - missed, 0.0),
        )

    def winner(self, candidates: Sequence[int], draws: Draws) -> int | None:
        """Index of the accepted draw, from two uniforms a draw; candidates are support columns, or -1."""
        scores = [self.score(column, draws.uniform(), draws.uniform()) for column in candidates]
        best = max(range(len(scores)), key=scores.__getitem__)
        return best if scores[best] > self.floor else None

    def win_probs(self, candidates: Sequence[int], positions: Sequence[float]) -> list[float]:
        """Probability, over the swaps, that each draw is accepted, given all positions."""
        scores = [
            self.scores(column, position)
            for column, position in zip(candidates, positions, strict=True)
        ]
        probs = list[float]()
        for draw, (own, swapped, swap_prob) in enumerate(scores):
            won = 0.0
            for place, weight in ((own, 1.0 - swap_prob), (swapped, swap_prob)):
                if weight > 0.0 and place > self.floor:
                    others = [
                        (rival, scores[rival]) for rival in range(len(scores)) if rival != draw
                    ]
                    won += weight * math.prod(
                        _is_below(other, place, rival > draw) for rival, other in others
                    )
            probs.append(won)
        return probs

    def score(self, column: int, position: float, swap: float) -> float:
        """Score of a draw, from two uniforms in [0, 1)."""
        own, swapped, swap_prob = self.scores(column, position)
        return swapped if swap < swap_prob else own

    def scores(self, column: int, position: float) -> tuple[float, float, float]:
        """The two scores that a draw may have, and the probability of the second, from a uniform in [0, 1)."""
        (places,) = (self.tokens == column).nonzero()
        if not places.size:
            return 0.0, 0.0, 0.0  # a mass too small for the line: refused
        rank = int(places[0])
        left, right = self.reaches[rank : rank + 2].tolist()
        own = max(right - position * (right - left), math.nextafter(left, right))
        window = rank + (own > self.floor)
        gain, here = float(self.gains[window]), self._density(own)
        start = float(self.borders[window])
        offered = self._power(own) - self._power(start) if own > self.floor else 0.0
        level = float(self.heights[window]) + (gain * (own - start) - offered)
        is_left = here > gain
        side = self.heights[window::-1] if is_left else self.heights[window + 1 :]
        is_below = side < level
        steps = int(is_below.argmax())
        if here == gain or not is_below[steps]:
            return own, own, 0.0
        swapped = self._crossing(level, window - steps if is_left else window + steps, is_left)
        there = self._density(swapped)
        # Clamped for the rounding where the surplus touches zero.
        return (
            own,
            swapped,
            min(1.0, max(0.0, (here - gain) / (here - there))) if here != there else 0.0,
        )

    def _crossing(self, level: float, window: int, is_left: bool) -> float:
        """Solve E = level in a window, left or right of its peak; see `_crossings` in `verify/functional/lines.py`."""
        width, gain = self.width, float(self.gains[window])
        start, stop = self.borders[window : window + 2].tolist()
        base = float(self.heights[window]) - level
        if start < self.floor:  # below w0 the surplus is a line
            return min(max(start - base / gain, start), stop)
        lead = base + self._power(start) - gain * start
        degree = 1.0 / (width - 1.0) if width > 1 else math.inf
        w = min(max(_short(min(gain / width, 1.0) ** degree), start), stop)
        for step in range(STEPS):
            least, less, power = _powers(w, width)
            excess, slope = lead + gain * w - power, gain - width * less
            bend = width * (width - 1.0) * least
            square = slope * slope + 2.0 * bend * excess
            side = (1.0 if is_left else -1.0) * math.sqrt(max(square, 0.0))
            if square <= 0.0:
                way = slope / bend if bend > 0.0 else 0.0
            elif is_left is not (slope < 0.0):
                way = -2.0 * excess / (slope + side)
            else:
                way = (slope - side) / bend if bend > 0.0 else math.inf
            w = min(max(w + way, start), stop)
            if step == 0 and not is_left:
                w = min(max(_short(max(lead + gain * w, 0.0) ** (1.0 / width)), start), stop)
        return w

    def _power(self, w: float) -> float:
        return _powers(w, self.width)[2]

    def _density(self, w: float) -> float:
        return self.width * _powers(w, self.width)[1] if w > self.floor else 0.0


def decide(p: Law, q: Law, drawn: Sequence[int], draws: Draws) -> int:
    """Accept one of several independent draws from q, or draw from the rest of p; two uniforms per draw."""
    part = q.sparse()
    token_ids, p_masses = part.token_ids, p.at(part.token_ids)
    line = NodeLine.build(p_masses.cpu().numpy(), part.probs.cpu().numpy(), len(drawn))
    winner = line.winner(_columns(token_ids.cpu().numpy(), drawn), draws)
    if winner is not None:
        return drawn[winner]
    masses = torch.from_numpy(line.masses).to(part.probs.device)
    return draws.categorical(below(p, token_ids, masses))


def chances(problem: NodeProblem) -> Flow:
    """Return the flow to the independent draws of a node, given their positions: a uniform per draw."""
    part, drawn = problem.draft_law.sparse(), problem.drawn
    positions = [problem.draws.uniform() for _ in drawn]
    p = (problem.scale * problem.target_law.at(part.token_ids)).cpu().numpy()
    line = NodeLine.build(p, part.probs.cpu().numpy(), len(drawn))
    probs = dict.fromkeys(drawn, 0.0)
    columns = _columns(part.token_ids.cpu().numpy(), drawn)
    for token, prob in zip(drawn, line.win_probs(columns, positions), strict=True):
        probs[token] += prob
    return Flow(
        accept_probs=probs,
        token_ids=part.token_ids,
        masses=torch.from_numpy(line.masses).to(part.probs.device),
    )


def _columns(token_ids: Int64[np.ndarray, " support"], drawn: Sequence[int]) -> list[int]:
    """Indices of drawn tokens in the support, -1 for a token outside it."""
    places = np.minimum(np.searchsorted(token_ids, drawn), token_ids.size - 1)
    return np.where(token_ids[places] == drawn, places, -1).tolist()


def _powers(w: Number, width: int) -> tuple[Number, Number, Number]:
    """As `Degrees.powers`."""
    least, square = w * 0.0 + 1.0, w
    for place in range(max(width - 2, 0).bit_length()):
        square = square * square if place else square
        least = least * square if (width - 2) >> place & 1 else least
    above = least * w if width > 1 else least
    return least, above, above * w


def _root(x: float, width: int) -> float:
    """As `Degrees.roots`."""
    more, less, start = width + 1.0, width - 1.0, _short(x ** (1.0 / width))
    power = _powers(start, width)[2]
    return start * ((less * power + more * x) / (more * power + less * x)) if start > 0.0 else 0.0


def _short(x: float) -> float:
    """The nearest number of 24 bits."""
    return float(np.float32(x))


def _running(masses: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Sums up to each place, in a quarter of numpy's time."""
    return torch.from_numpy(masses).cumsum(0).numpy()


def _is_below(scores: tuple[float, float, float], place: float, is_later: bool) -> float:
    """Probability that a draw scores below a place; of equal scores that of the later draw counts as the smaller."""
    own, swapped, swap_prob = scores
    return (own < place or (own == place and is_later)) * (1.0 - swap_prob) + (
        swapped < place or (swapped == place and is_later)
    ) * swap_prob
