"""The tokens that top-p keeps: by selection on the host, by sorting on a device.

Both keep the same set. In order of mass, and of ids among equal masses, these are the tokens before
which the running sum of masses is below `top_p`.
"""

import math
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from monge.core.law import places_of

_FEW: Final = 512  # masses that are sorted in the time of a few calls
_BUCKET_BITS: Final = 10
_EVERYTHING: Final = (0.0, 0.0, math.inf)


def most_probable(
    probs: Float64[Tensor, "*rows vocab"], top_p: Float[Tensor, "*some"]
) -> Bool[Tensor, "*rows vocab"]:
    """Return a mask of the tokens that top-p keeps; rows that are NaN stay as they are.

    Selection reads numbers on the way. A device would wait for them, and a compiler cannot: there
    the masses are sorted, so that nothing waits and no shape depends on data.

    Args:
        probs: Laws in float64, `[..., vocab]`.
        top_p: Numbers in (0, 1], `[..., 1]` or a shape that broadcasts to it.
    """
    # Tensors without data are of another type.
    if not torch.compiler.is_compiling() and probs.is_cpu and type(probs) is Tensor:
        rows = probs.detach().reshape(-1, probs.shape[-1]).numpy()
        shares: list[float] = top_p.expand(*probs.shape[:-1], 1).flatten().tolist()
        masks = np.zeros(rows.shape, dtype=np.bool_)
        for mask, masses, share in zip(masks, rows, shares, strict=True):
            mask[_selected(masses, share)] = True
        return torch.from_numpy(masks).view(probs.shape)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    # The most probable token always stays, whatever the rounding of the running sum.
    is_kept = (before < top_p).index_fill(-1, torch.zeros_like(order.view(-1)[:1]), True)
    return torch.empty_like(is_kept).scatter(-1, order, is_kept).logical_or(top_p >= 1)


def most_probable_ids(probs: Float64[Tensor, " vocab"], top_p: float) -> Int64[Tensor, " support"]:
    """Return the tokens of one law that top-p keeps, in increasing order; the host waits."""
    if probs.is_cpu:
        return torch.from_numpy(_selected(probs.detach().numpy(), top_p))
    return places_of(most_probable(probs, probs.new_full((1,), top_p)))


def _selected(masses: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    if not top_p < 1 or math.isnan(masses[0]):
        return np.arange(masses.size)
    # All smaller masses together are less than what top-p leaves out.
    is_large = masses >= (1 - top_p) / (2 * masses.size)
    if np.count_nonzero(is_large) < masses.size // 2:
        large_ids = np.flatnonzero(is_large)
        large = masses[large_ids]
        if large.sum() - top_p > _rounding(masses):
            return large_ids[_places(large, top_p)]
    return _places(masses, top_p)


def _places(masses: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Return what a full sort keeps, although only masses near the smallest that stays are sorted.

    Where the rounding of a sum in another order could decide, all masses are sorted.
    """
    for above, low, high in (_interval(masses, top_p), _EVERYTHING):
        is_kept = masses > high
        places = np.flatnonzero((masses >= low) & (masses <= high))
        if low == high:
            count = (top_p - above) / low
            if abs(count - round(count)) * low > _rounding(masses):
                is_kept[places[: math.ceil(count)]] = True
                break
            continue
        places = places[np.argsort(-masses[places], kind="stable")]
        before = above + (masses[places].cumsum() - masses[places])
        # With nothing above, these are the very sums of a full sort.
        if above == 0 or np.abs(before - top_p).min() > _rounding(masses):
            is_kept[places[before < top_p]] = True
            break
    return np.flatnonzero(is_kept)


def _interval(masses: NDArray[np.float64], top_p: float) -> tuple[float, float, float]:
    """Return the mass above an interval, and its ends, between which the smallest mass that stays is.

    The interval holds few or equal masses, or all of them where rounding could decide.
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
            return _EVERYTHING
        # Where rounding could decide that nothing of the bucket stays, `_places` sorts everything.
        above = float(reach[place - 1]) if place else above
        part = part[np.flatnonzero(bucket == reach.size - 1 - place)]
        low, high = part.min(), part.max()
    return above, float(low), float(high)


def _rounding(masses: NDArray[np.float64]) -> float:
    """Bound the rounding of ten sums: of the sort, of at most seven histograms, and of the last few masses."""
    return 10 * (masses.size + 8) * 2.0**-53
