"""Scores of the draws of many nodes on their lines, and the verdicts that follow from them.

Positions are w = 1 - v, see `verify/fast/lines.py`. The partner of a position with a surplus, xt(w)
> g(w), is the nearest w' < w with E(w') < E(w); of one with a deficit, the nearest w' > w.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.verify.fast.lines import Lines

NEWTON_STEPS: Final = 5
"""Steps after the first guess: quadratic convergence, from a guess that is exact for two draws."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Where the draws of some nodes may score.

    `swapped` with probability `swap_probs`, else `own`; a refused draw has both 0.

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
        """Index of the accepted draw of each node, -1 where none is.

        One uniform a draw decides whether it swaps.
        """
        best, draw = torch.where(swaps < self.swap_probs, self.swapped, self.own).max(1)
        return torch.where(best > self.floors.squeeze(1), draw, -1)

    def win_probs(self) -> Float64[Tensor, "nodes draws"]:
        """Probability that each draw is the accepted one, given all positions.

        Over the swaps alone.
        """
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


def _partners(lines: Lines, own: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """The partner of each position and the probability of scoring there.

    A position without one is its own.
    """
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
    """Where E crosses each level in a window in which it is concave.

    Left of its peak, or right of it.

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
