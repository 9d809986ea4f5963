"""The optimal rule at many nodes at once: the line of each node, and the scores of its draws.

p = target (sub-)law, q = draft law, K = number of draws, padded to `[nodes, support]`. Positions
are w = 1 - v, where v is that of `transport/rearrangement.py`: tokens lie by *increasing* p/q from
0 to 1, the largest of K scores wins, and it is accepted if it is above w0 = (1 - alpha)^(1/K). With
A the integral of g = min(p/q, mu) from 0 to w, the surplus is

    E(w) = A(w) - (w^K - w0^K)_+ ,

concave between neighbouring borders, without the difference of two numbers close to one. The
partner of a position with a surplus, xt(w) > g(w), is the nearest w' < w with E(w') < E(w); of one
with a deficit, the nearest w' > w.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

SMALLEST_MASS: Final = 1e-290
"""Draft masses below this have no finite ratio p / q.

Such a token has no place on the line and is never accepted as a draw: less than 1e-284 of total
variation, for up to a million tokens.
"""

NEWTON_STEPS: Final = 5
"""Steps after the first guess: quadratic convergence, from a guess that is exact for two draws."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """The lines of some nodes.

    Args:
        widths: K of each node, as float64, `[nodes, 1]`.
        floors: w0 = (1 - alpha)^(1/K), `[nodes, 1]`.
        masses: a = min(p, mu q), what the rule accepts of each token, `[nodes, support]`, tokens in
            the order of the input.
        ranks: Place of each token on the line, -1 for one without a place, `[nodes, support]`.
        reaches: Edges of the windows of the ranks, `[nodes, ranks + 1]`.
        borders: The same and w0 among them, `[nodes, borders]`.
        gains: g between neighbouring borders, `[nodes, borders - 1]`.
        heights: E at the borders, `[nodes, borders]`.
    """

    widths: Float64[Tensor, "nodes 1"]
    floors: Float64[Tensor, "nodes 1"]
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
    ) -> "Lines":
        """The lines of targets p, which may sum to less than one, and draft laws q; padding is zero.

        Args:
            p: Target masses on the support of the draft law, scaled for a sub-target, zero on
                deterministic candidates.
            q: Draft masses, each row summing to one; tokens in the order in which ties of p/q are
                to be laid.
            widths: Draws of each node, at least one.
        """
        power = widths.to(torch.float64).unsqueeze(1)
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
        missed = (reaches[:, 1:] ** power - below).amax(1, keepdim=True).clamp_min(0.0)
        line = _ceilings(kept, drawn, torch.where(on_line, ratios, 0.0), 1.0 - missed)
        floors = missed ** (1.0 / power)
        borders, gains = _split(
            reaches, torch.minimum(torch.where(on_line, ratios, 0.0), line), floors
        )
        received = _led_by_zero((borders.diff(dim=1) * gains).cumsum(1))
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        return cls(
            widths=power,
            floors=floors,
            masses=torch.where(has_place, torch.minimum(p, line * q), 0.0),
            ranks=torch.empty_like(order).scatter_(1, order, torch.where(on_line, places, -1)),
            reaches=reaches,
            borders=borders,
            gains=gains,
            heights=received - (borders**power - missed).clamp_min(0.0),
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
            positions: Uniforms in [0, 1), one a draw.
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
        """Index of the accepted draw of each node, -1 for none; one uniform a draw decides its swap."""
        best, draw = torch.where(swaps < self.swap_probs, self.swapped, self.own).max(1)
        return torch.where(best > self.floors.squeeze(1), draw, -1)

    def win_probs(self) -> Float64[Tensor, "nodes draws"]:
        """Probability, over the swaps, that each draw is the accepted one given all positions."""
        places = torch.stack([self.own, self.swapped], 2)  # [nodes, draws, 2]
        weights = torch.stack([1.0 - self.swap_probs, self.swap_probs], 2)
        mine, theirs = (
            places[:, :, :, None, None],
            places[:, None, None, :, :],
        )  # [nodes, draws, 2, rivals, 2]
        draw = torch.arange(self.own.shape[1], device=self.own.device)
        # Of equal scores the earlier draw's counts as the larger.
        is_earlier = (draw[:, None] < draw)[:, None, :, None]
        beats = (
            ((mine > theirs) | ((mine == theirs) & is_earlier)) * weights[:, None, None, :, :]
        ).sum(4)
        wins = torch.where((draw[:, None] == draw)[:, None, :], 1.0, beats).prod(3)
        return (weights * wins * (places > self.floors.unsqueeze(2))).sum(2)


def _ceilings(kept: Tensor, drawn: Tensor, ratios: Tensor, totals: Tensor) -> Tensor:
    """The level mu of each node at which `sum(min(p, mu q))` is the total, tokens by increasing p/q.

    `sum(min(p, mu q))` is the smallest over k of `p(first k) + mu q(others)`, so mu is the largest
    of the levels at which one of these reaches the total. At that k it lies below the k-th ratio;
    elsewhere only the rounding of a difference over a tiny sum can carry a level above both.
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
    offered = torch.where(is_above, own**lines.widths - starts**lines.widths, 0.0)
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
    """The nearest border left or right of each position where E is below a level, and whether there is one."""
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

    A quadratic at the peak gives the first guess. Then Newton's method, on E where E is steepest
    (left), on `w - (w^K + E - level)^(1/K)` to the right, where w^K takes over and this is almost a
    line. Both are concave or convex: from the second step on they approach the crossing from
    outside.
    """
    width, start, gain = (
        lines.widths,
        lines.borders.gather(1, windows),
        lines.gains.gather(1, windows),
    )
    stop, base = lines.borders.gather(1, windows + 1), lines.heights.gather(1, windows) - levels
    is_flat = start < lines.floors  # below w0 the surplus is a line
    foot = torch.where(is_flat, 0.0, start**width)
    peak = torch.where(
        is_flat, stop, torch.minimum((gain / width).clamp(0.0, 1.0) ** (1.0 / (width - 1.0)), stop)
    )
    peak = torch.maximum(peak, start)
    rise = (base + gain * (peak - start) - torch.where(is_flat, 0.0, peak**width - foot)).clamp_min(
        0.0
    )
    slope = torch.where(is_flat, gain, gain - width * peak ** (width - 1.0)).abs()
    bend = torch.where(is_flat, 0.0, width * (width - 1.0) * peak ** (width - 2.0).clamp_min(0.0))
    span = 2.0 * rise / (slope + (slope * slope + 2.0 * bend * rise).sqrt())
    guess = w = torch.where(
        rise > 0.0, torch.clamp(torch.where(is_left, peak - span, peak + span), start, stop), peak
    )
    lead, degree, slant = base + foot - gain * start, width - 1.0, gain / width
    for _ in range(NEWTON_STEPS):
        bound = torch.addcmul(lead, gain, w)  # w^K + E - level
        power = w**degree
        risen = torch.addcmul(bound, power, w, value=-1.0) / torch.addcmul(
            gain, power, width, value=-1.0
        )
        root = bound.clamp_min(0.0) ** (1.0 / width)
        fallen = (w - root) / (1.0 - slant * root / bound)
        w = torch.clamp(w - torch.where(is_left, risen, fallen), start, stop)
    # 0 / 0: the crossing is the peak itself, or (K = 1) the guess is exact and the step is
    # undefined.
    return torch.where(is_flat | w.isnan(), guess, w)


def _densities(lines: Lines, w: Tensor) -> Tensor:
    """Density xt of the largest score, cut off at w0."""
    return torch.where(w > lines.floors, lines.widths * w ** (lines.widths - 1.0), 0.0)
