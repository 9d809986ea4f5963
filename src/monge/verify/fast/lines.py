"""The lines of many nodes: how the optimal rule lays each node's draft law on [0, 1], and what each token is to receive.

p = target (sub-)law, q = draft law, K = number of draws, padded to `[nodes, support]`. Positions
are w = 1 - v, where v is that of `transport/rearrangement.py`: tokens lie by *increasing* p/q from
0 to 1, the largest of K scores wins, and it is accepted if it is above w0 = (1 - alpha)^(1/K). With
A the integral of g = min(p/q, mu) from 0 to w, the surplus is

    E(w) = A(w) - (w^K - w0^K)_+ ,

concave between neighbouring borders, without the difference of two numbers close to one.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.verify.score_search import SMALLEST_MASS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """The lines of some nodes.

    Args:
        widths: K of each node, as float64, `[nodes, 1]`.
        floors: w0 = (1 - alpha)^(1/K), `[nodes, 1]`.
        masses: a = min(p, mu q), what the rule accepts of each token, `[nodes, support]`, tokens in
            the order of the input.
        ranks: Place of each token on the line, -1 for one without a place, `[nodes, support]`.
        reaches: Where the windows of the ranks begin and end, `[nodes, ranks + 1]`.
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
        """The lines of targets p, which may sum to less than one, and draft laws q.

        Both are zero where a row is padded.

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
    """The borders with w0 among them, and the gains between them.

    The window that straddles w0 becomes two.
    """
    lowest, highest = torch.full_like(floors, -torch.inf), torch.full_like(floors, torch.inf)
    after, before = torch.cat([reaches, highest], 1), torch.cat([lowest, reaches], 1)
    borders = torch.maximum(before, torch.minimum(after, floors))
    is_lower = reaches < floors
    return borders, torch.where(
        is_lower, torch.cat([gains, gains[:, -1:]], 1), torch.cat([gains[:, :1], gains], 1)
    )


def _led_by_zero(sums: Tensor) -> Tensor:
    return torch.nn.functional.pad(sums, (1, 0))
