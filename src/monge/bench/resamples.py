"""Means and ratios with intervals, by resampling whole clusters."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from monge.core.errors import MongeError
from monge.laws.draws import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and the interval that holds the middle 95% of its resampled values."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resamples:
    """Bootstrap resamples of whole clusters, since only numbers within a text are dependent.

    All estimates made with the same object use the same resamples, so their differences are paired.

    Args:
        choices: Clusters of every resample, drawn with replacement, `[resamples, clusters]`.
    """

    choices: Int64[np.ndarray, "resamples clusters"]

    @classmethod
    def draw(cls, num_clusters: int, draws: Draws, *, count: int = 1000) -> "Resamples":
        """Draw `count` resamples."""
        drawn = [
            [int(draws.uniform() * num_clusters) for _ in range(num_clusters)] for _ in range(count)
        ]
        return cls(choices=np.array(drawn, dtype=np.int64))

    def estimate(
        self, values: Float64[np.ndarray, " values"], clusters: Int64[np.ndarray, " values"]
    ) -> Estimate:
        """Mean of all values, each belonging to a cluster, with its percentile interval (Efron 1979).

        A resample that holds none of the clusters with values is left out.
        """
        return self.ratio(values, np.ones(values.size), clusters)

    def ratio(
        self,
        values: Float64[np.ndarray, " values"],
        others: Float64[np.ndarray, " values"],
        clusters: Int64[np.ndarray, " values"],
    ) -> Estimate:
        """Ratio of two sums over the same clusters, with its percentile interval."""
        if values.size == 0:
            raise MongeError("statistics: nothing was measured, so there is nothing to estimate")
        sizes = [
            np.bincount(clusters, weights=part, minlength=self.choices.shape[1])
            for part in (values, others)
        ]
        top, bottom = (size[self.choices].sum(axis=1) for size in sizes)
        low, high = np.percentile(top[bottom > 0] / bottom[bottom > 0], [2.5, 97.5])
        return Estimate(mean=float(values.sum() / others.sum()), low=float(low), high=float(high))
