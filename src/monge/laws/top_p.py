"""The tokens that top-p keeps, selected on the host without a full sort.

It keeps what a full sort keeps. In the order of `SamplingRules`, these are the tokens before which
the running sum of masses is below `top_p`.
"""

import math
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

_FEW: Final = 512  # masses that are sorted in the time of a few calls
_BUCKET_BITS: Final = 10


def most_probable_ids(
    probs: Float64[Tensor, " vocab"], scores: Float[Tensor, " vocab"], top_p: float
) -> Int64[Tensor, " support"]:
    """Return the tokens of a law on the host that top-p keeps, in increasing order.

    Args:
        probs: Masses.
        scores: Scores of the tokens, by which they are ordered: masses may be equal where scores
            are not. A token of mass 0 may have any score below those of the other tokens.
        top_p: A number in (0, 1].
    """
    return torch.from_numpy(_selected(probs.detach().numpy(), _readable(scores), top_p))


def _readable(scores: Tensor) -> NDArray[np.floating]:
    """Return scores in a type that numpy compares quickly."""
    is_wide = scores.dtype in {torch.float32, torch.float64}
    return scores.detach().numpy() if is_wide else scores.detach().float().numpy()


def _selected(
    masses: NDArray[np.float64], scores: NDArray[np.floating], top_p: float
) -> NDArray[np.int64]:
    if not top_p < 1 or math.isnan(masses[0]):
        return np.arange(masses.size)
    # All smaller masses together are less than what top-p leaves out.
    is_large = masses >= (1 - top_p) / (2 * masses.size)
    if np.count_nonzero(is_large) < masses.size // 2:
        large_ids = np.flatnonzero(is_large)
        large = masses[large_ids]
        if large.sum() - top_p > _rounding(masses):
            return large_ids[_places(large, scores[large_ids], top_p)]
    return _places(masses, scores, top_p)


def _places(
    masses: NDArray[np.float64], scores: NDArray[np.floating], top_p: float
) -> NDArray[np.int64]:
    """Return what a full sort keeps, although only tokens near the last kept token are sorted.

    Where the rounding of a sum in another order could decide, all tokens are sorted.
    """
    rounding, (low, high) = _rounding(masses), _interval(masses, top_p)
    if low > 0 or high < math.inf:
        # Their scores, since the order of masses is that of scores only up to rounding.
        near = scores[(masses >= low) & (masses <= high)]
        is_kept = scores > near.max()
        places = np.flatnonzero((scores >= near.min()) & ~is_kept)
        above = float(masses @ is_kept)
        places, before = _ordered(places, masses, scores, above)
        last = places[-1]
        is_reached = before[-1] + masses[last] - top_p > rounding
        # With nothing above, these are the very sums of a full sort.
        is_sure = above == 0 or (above < top_p and bool(np.abs(before - top_p).min() > rounding))
        if is_reached and is_sure:
            is_kept[places[before < top_p]] = True
            return np.flatnonzero(is_kept)
    places, before = _ordered(np.arange(masses.size), masses, scores, 0.0)
    return np.sort(places[before < top_p])


def _ordered(
    places: NDArray[np.int64],
    masses: NDArray[np.float64],
    scores: NDArray[np.floating],
    above: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return places in the order of their scores, and the sums of masses before them."""
    places = places[np.argsort(-scores[places], kind="stable")]
    return places, above + (masses[places].cumsum() - masses[places])


def _interval(masses: NDArray[np.float64], top_p: float) -> tuple[float, float]:
    """Return the ends of an interval of masses that contains the last kept mass, up to rounding.

    The interval holds few or equal masses; it is unbounded where rounding could decide.
    """
    above, part, rounding = 0.0, masses, _rounding(masses)
    low, high = part.min(), part.max()
    while part.size > _FEW and low < high:
        # A histogram of bits, which have the order of the masses, since these are not negative.
        bits, first = part.view(np.int64), int(low.view(np.int64))
        width = (int(high.view(np.int64)) - first).bit_length()
        bucket = bits - first
        bucket >>= max(0, width - _BUCKET_BITS)
        reach = above + np.bincount(bucket, weights=part)[::-1].cumsum()
        place = int(np.searchsorted(reach, top_p))
        if place == reach.size or reach[place] - top_p <= rounding:
            return 0.0, math.inf
        # Where rounding could decide that nothing of the bucket stays, `_places` sorts everything.
        above = float(reach[place - 1]) if place else above
        part = part[np.flatnonzero(bucket == reach.size - 1 - place)]
        low, high = part.min(), part.max()
    return float(low), float(high)


def _rounding(masses: NDArray[np.float64]) -> float:
    """Bound the rounding of ten sums: of the sort, of at most seven histograms, and of the last few masses."""
    return 10 * (masses.size + 8) * 2.0**-53
