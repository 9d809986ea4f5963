"""The optimal rule at many nodes at once: the line of each node, and the scores of its draws.

p = target (sub-)law, q = draft law, K = number of draws, padded to `[nodes, support]`. Tokens lie
side by side on [0, 1] by *increasing* p/q, token y on a window of length q(y). Each draw takes a
uniform position in the window of its token; the largest of K scores wins, and is accepted if it is
above w0 = (1 - alpha)^(1/K). The largest of K uniform numbers has density xt(w) = K w^(K-1), cut
off at w0. Token y is to receive a(y) = q(y) g(y), g = min(p/q, mu), the flattest masses that sum to
alpha. With A the integral of g from 0 to w, the surplus is

    E(w) = A(w) - (w^K - w0^K)_+ ,

concave between neighbouring borders, without the difference of two numbers close to 1. The partner
of a position with a surplus, xt(w) > g(w), is the nearest w' < w with E(w') < E(w); that of a
position with a deficit is the nearest w' > w. The score is the partner w' with probability

    m(w) = ( xt(w) - g(w) ) / ( xt(w) - xt(w') ),   else w.

|dE| is equal at both ends, so m(w) dw = m(w') dw': scores stay uniform; and E[xt(score) | w] = g:
every token receives a(y).

Sums run in order, powers are products, and a root is a start of few digits and a step from it.
These are rounded alike for one node and for many, by numpy and torch, so that on a CPU all forms of
the rule agree to the last bit. `**` is not.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

SMALLEST_MASS: Final = 1e-290
"""Draft masses below this have no finite ratio p / q.

Such a token has no place on the line and is never accepted as a draw: less than 1e-284 of total
variation, for up to a million tokens.
"""

STEPS: Final = 4
"""Steps to a crossing: enough for 32 draws, to the last bits."""


class Degrees(NamedTuple):
    """Exponents of some nodes.

    Args:
        widths: K of each node, `[nodes, 1]`.
        bits: The binary digits of K - 2, the lowest first, each `[nodes, 1]`.
    """

    widths: Float64[Tensor, "nodes 1"]
    bits: tuple[Bool[Tensor, "nodes 1"], ...]

    @classmethod
    def of(cls, widths: Int64[Tensor, " nodes"], most: int) -> "Degrees":
        """Exponents of at most `most`."""
        rest = (widths - 2).clamp_min(0).unsqueeze(1)
        places = range(max(most - 2, 0).bit_length())
        return cls(
            widths.to(torch.float64).unsqueeze(1), tuple((rest >> n) % 2 == 1 for n in places)
        )

    def powers(self, w: Float64[Tensor, "nodes some"]) -> tuple[Tensor, Tensor, Tensor]:
        """`w^(K - 2)` (1 for a single draw), `w^(K - 1)` and `w^K`."""
        least, square = torch.ones_like(w), w
        for place, is_set in enumerate(self.bits):
            square = square * square if place else square
            least = torch.where(is_set, least * square, least)
        above = torch.where(self.widths == 1.0, 1.0, least * w)
        return least, above, above * w

    def roots(self, x: Float64[Tensor, "nodes 1"]) -> Float64[Tensor, "nodes 1"]:
        """`x^(1 / K)`, a step of Halley's method from the nearest number of 24 bits."""
        more, less = self.widths + 1.0, self.widths - 1.0
        start = (x ** (1.0 / self.widths)).float().double()
        power = self.powers(start)[2]
        root = start * ((less * power + more * x) / (more * power + less * x))
        return torch.where(start == 0.0, 0.0, root)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """The lines of some nodes.

    Args:
        degrees: K of each node.
        floors: w0 = (1 - alpha)^(1/K), `[nodes, 1]`.
        ceilings: mu, `[nodes, 1]`.
        masses: a = min(p, mu q), what the rule accepts of each token, `[nodes, support]`, tokens in
            the order of the input.
        ranks: Place of each token on the line, -1 for a token without a place, `[nodes, support]`.
        reaches: Edges of the windows of the ranks, `[nodes, ranks + 1]`.
        borders: The same and w0 among them, `[nodes, borders]`.
        gains: g between neighbouring borders, `[nodes, borders - 1]`.
        heights: E at the borders, `[nodes, borders]`.
    """

    degrees: Degrees
    floors: Float64[Tensor, "nodes 1"]
    ceilings: Float64[Tensor, "nodes 1"]
    masses: Float64[Tensor, "nodes support"]
    ranks: Int64[Tensor, "nodes support"]
    reaches: Float64[Tensor, "nodes edges"]
    borders: Float64[Tensor, "nodes borders"]
    gains: Float64[Tensor, "nodes windows"]
    heights: Float64[Tensor, "nodes borders"]

    @classmethod
    def build(
        cls,
        p: Float64[Tensor, "nodes support"],
        q: Float64[Tensor, "nodes support"],
        widths: Int64[Tensor, " nodes"],
        most: int,
    ) -> "Lines":
        """The lines of targets p, which may sum to less than 1, and draft laws q; padding is zero.

        Args:
            p: Target masses on the support of the draft law, scaled for a sub-target, zero on
                deterministic candidates.
            q: Draft masses, each row summing to 1; tokens in the order in which ties of p/q are to
                be laid.
            widths: Draws of each node, at least one.
            most: No fewer than the most draws of a node.
        """
        degrees = Degrees.of(widths, most)
        has_place = q > SMALLEST_MASS
        ratios, order = torch.where(has_place, p / q, torch.inf).sort(dim=1, stable=True)
        on_line = has_place.gather(1, order)
        kept, drawn = (
            torch.where(on_line, p.gather(1, order), 0.0),
            torch.where(on_line, q.gather(1, order), 0.0),
        )
        below = kept.cumsum(1)
        reaches = _led_by_zero(drawn.cumsum(1))
        # Takes the rounding of the sum away: the last window ends at one.
        reaches = reaches / reaches[:, -1:]
        within = degrees.powers(reaches[:, 1:])[2]
        missed = (within - below).amax(1, keepdim=True).clamp_min(0.0)
        line = _ceilings(kept, drawn, torch.where(on_line, ratios, 0.0), 1.0 - missed)
        floors = degrees.roots(missed)
        borders, gains = _split(
            reaches, torch.minimum(torch.where(on_line, ratios, 0.0), line), floors
        )
        received = _led_by_zero((borders.diff(dim=1) * gains).cumsum(1))
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        return cls(
            degrees=degrees,
            floors=floors,
            ceilings=line,
            masses=torch.where(has_place, torch.minimum(p, line * q), 0.0),
            ranks=torch.empty_like(order).scatter_(1, order, torch.where(on_line, places, -1)),
            reaches=reaches,
            borders=borders,
            gains=gains,
            heights=received - (degrees.powers(borders)[2] - missed).clamp_min(0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """The scores of the draws: `swapped` with probability `swap_probs`, else `own`; both 0 for a refused draw.

    Args:
        own: The drawn positions, `[nodes, draws]`.
        swapped: Their partners, `[nodes, draws]`.
        swap_probs: m, `[nodes, draws]`.
        floors: w0, `[nodes, 1]`.
    """

    own: Float64[Tensor, "nodes draws"]
    swapped: Float64[Tensor, "nodes draws"]
    swap_probs: Float64[Tensor, "nodes draws"]
    floors: Float64[Tensor, "nodes 1"]

    @classmethod
    def of(
        cls,
        lines: Lines,
        candidates: Int64[Tensor, "nodes draws"],
        positions: Float64[Tensor, "nodes draws"],
    ) -> "Scores":
        """Scores of draws at these positions in the windows of their tokens.

        Args:
            lines: The lines of the nodes.
            candidates: Drawn tokens as columns of the support; -1 pads, and refuses.
            positions: A uniform in [0, 1) per draw.
        """
        ranks = torch.where(candidates < 0, -1, lines.ranks.gather(1, candidates.clamp_min(0)))
        is_refused = ranks < 0
        ranks = ranks.clamp_min(0)
        left, right = lines.reaches.gather(1, ranks), lines.reaches.gather(1, ranks + 1)
        own = torch.maximum(right - positions * (right - left), torch.nextafter(left, right))
        swapped, swap_probs = _partners(lines, own, ranks + (own > lines.floors))
        return cls(
            own=torch.where(is_refused, 0.0, own),
            swapped=torch.where(is_refused, 0.0, swapped),
            swap_probs=torch.where(is_refused, 0.0, swap_probs),
            floors=lines.floors,
        )

    def winners(self, swaps: Float64[Tensor, "nodes draws"]) -> Int64[Tensor, " nodes"]:
        """Index of the accepted draw of each node, -1 for none; a uniform per draw decides its swap."""
        scores = torch.where(swaps < self.swap_probs, self.swapped, self.own)
        draw = scores.argmax(1, keepdim=True)  # the first of equal values
        return torch.where(scores.gather(1, draw) > self.floors, draw, -1).squeeze(1)

    def win_probs(self) -> Float64[Tensor, "nodes draws"]:
        """Probability, over the swaps, that each draw is accepted, given all positions."""
        places = self.own, self.swapped
        weights = 1.0 - self.swap_probs, self.swap_probs
        draw, probs = torch.arange(self.own.shape[1], device=self.own.device), 0.0
        for place, weight in zip(places, weights, strict=True):
            won = torch.ones_like(place)
            for rival in range(place.shape[1]):
                # Of equal scores the earlier draw's counts as the larger.
                below, swapped = (
                    ((theirs := scores[:, rival, None]) < place)
                    | ((theirs == place) & (draw < rival))
                    for scores in places
                )
                stays, other = (shares[:, rival, None] for shares in weights)
                won = torch.where(draw == rival, won, won * (below * stays + swapped * other))
            probs = probs + torch.where(place > self.floors, weight * won, 0.0)
        assert isinstance(probs, Tensor)
        return probs


def _ceilings(kept: Tensor, drawn: Tensor, ratios: Tensor, totals: Tensor) -> Tensor:
    """The level mu of each node at which `sum(min(p, mu q))` is the total, tokens by increasing p/q.

    `sum(min(p, mu q))` is the smallest over k of `p(first k) + mu q(others)`, so mu is the largest
    of the levels at which one of these sums reaches the total. At that k it lies below the k-th
    ratio; elsewhere only the rounding of a difference over a tiny sum can carry a level above both.
    """
    before = kept.cumsum(1) - kept
    others = drawn.flip(1).cumsum(1).flip(1)
    levels = torch.minimum((totals - before) / others, ratios)
    return torch.where(drawn > 0.0, levels, 0.0).amax(1, keepdim=True).clamp_min(0.0)


def _split(reaches: Tensor, gains: Tensor, floors: Tensor) -> tuple[Tensor, Tensor]:
    """The borders with w0 among them, which splits its window, and the gains between them."""
    lowest, highest = torch.full_like(floors, -torch.inf), torch.full_like(floors, torch.inf)
    after, before = torch.cat([reaches, highest], 1), torch.cat([lowest, reaches], 1)
    borders = torch.maximum(before, torch.minimum(after, floors))
    is_lower = reaches < floors
    return borders, torch.where(
        is_lower, torch.cat([gains, gains[:, -1:]], 1), torch.cat([gains[:, :1], gains], 1)
    )


def _led_by_zero(sums: Tensor) -> Tensor:
    return torch.nn.functional.pad(sums, (1, 0))


def _partners(lines: Lines, own: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """The partner of each position (its own if it has none), and the probability of scoring there."""
    gains, starts = lines.gains.gather(1, windows), lines.borders.gather(1, windows)
    is_above = own > lines.floors
    powers = lines.degrees.powers
    offered = torch.where(is_above, powers(own)[2] - powers(starts)[2], 0.0)
    levels = lines.heights.gather(1, windows) + (gains * (own - starts) - offered)
    here = _densities(lines, own)
    is_left = here > gains
    borders, is_found = _nearest_below(lines.heights, levels, windows, is_left)
    landings = (borders - (~is_left).long()).clamp(0, lines.gains.shape[1] - 1)
    swapped = torch.where(
        is_found & (here != gains), _crossings(lines, levels, landings, is_left), own
    )
    there = _densities(lines, swapped)
    # Equal densities: nothing to exchange (one draw away from w0, or a position that is its own
    # partner).
    swap_probs = torch.where(here == there, 0.0, (here - gains) / (here - there))
    return swapped, swap_probs.clamp(0.0, 1.0)  # in [0, 1] but for rounding where E touches zero


def _nearest_below(
    heights: Tensor, levels: Tensor, windows: Tensor, is_left: Tensor
) -> tuple[Tensor, Tensor]:
    """The nearest border left or right of each position where E is below a level, and whether it exists."""
    count = heights.shape[1]
    index = torch.arange(count, device=heights.device)
    is_side = (index > windows.unsqueeze(2)) != is_left.unsqueeze(2)
    is_below = (heights.unsqueeze(1) < levels.unsqueeze(2)) & is_side  # [nodes, draws, borders]
    sign = torch.where(is_left, 1, -1)
    key = torch.where(is_below, index * sign.unsqueeze(2), -count).amax(2)
    return key * sign, key > -count


def _crossings(
    lines: Lines,
    levels: Float64[Tensor, "nodes draws"],
    windows: Int64[Tensor, "nodes draws"],
    is_left: Bool[Tensor, "nodes draws"],
) -> Float64[Tensor, "nodes draws"]:
    """Solve E = level for each draw in a window in which E is concave, left or right of its peak.

    Each step solves the quadratic with the value, slope and bend of E; the first step starts about
    the peak. To the right, where w^K soon takes over, `(w^K + E - level)^(1/K)` is nearer.
    """
    degrees, width = lines.degrees, lines.degrees.widths
    start, stop = lines.borders.gather(1, windows), lines.borders.gather(1, windows + 1)
    gain, base = lines.gains.gather(1, windows), lines.heights.gather(1, windows) - levels
    lead = base + degrees.powers(start)[2] - gain * start
    peak = (gain / width).clamp(0.0, 1.0) ** (1.0 / (width - 1.0))
    w = torch.clamp(peak.float().double(), start, stop)
    for step in range(STEPS):
        least, less, power = degrees.powers(w)
        excess, slope = lead + gain * w - power, gain - width * less
        bend = width * (width - 1.0) * least
        square = slope * slope + 2.0 * bend * excess
        side = torch.where(is_left, 1.0, -1.0) * square.clamp_min(0.0).sqrt()
        near = torch.where(
            is_left ^ (slope < 0.0), -2.0 * excess / (slope + side), (slope - side) / bend
        )
        way = torch.where(square > 0.0, near, torch.where(bend > 0.0, slope / bend, 0.0))
        w = torch.clamp(w + way, start, stop)
        if step == 0:
            root = (lead + gain * w).clamp_min(0.0) ** (1.0 / width)
            root = torch.clamp(root.float().double(), start, stop)
            w = torch.where(is_left, w, root)
    # Below w0 the surplus is a line.
    return torch.where(start < lines.floors, torch.clamp(start - base / gain, start, stop), w)


def _densities(lines: Lines, w: Tensor) -> Tensor:
    """Density xt of the largest score, cut off at w0."""
    power = lines.degrees.powers(w)[1]
    return torch.where(w > lines.floors, lines.degrees.widths * power, 0.0)
