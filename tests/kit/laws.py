"""Distances of laws."""

from monge.laws.law import Law


def total_variation(p: Law, q: Law) -> float:
    """Half the L1 distance: the smallest rejection probability of one draft."""
    left, right = p.sparse(), q.sparse()
    # Both laws have mass one, so the sum of (p - q)_+ is half of the L1 distance.
    return float((left.probs - right.at(left.token_ids)).clamp_min(0.0).sum())
