"""Acceptance by depth, estimated from finished rounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final

_FIRST_ACCEPTANCE: Final = 0.75
"""Acceptance of every depth before the first round."""
_DOUBT: Final = 0.25
"""Half a standard error of the expected tokens after one round, as a share of them: the tokens of a
round deviate by about half their mean."""
_RECENT_KEEP: Final = 0.93
"""Factor on the weight of a round with each later round, in the counts of the last rounds."""
_USUAL_KEEP: Final = 0.99
"""The same factor, in the counts to which those are shrunk."""
_PRIOR_WEIGHT: Final = 6.0
"""Weight of the prior, in rounds. It is small, so that a useless drafter is detected soon."""


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """Counts of rounds that requested drafts, and that reached and accepted each depth.

    A depth is reached if all nodes above it were accepted and it had candidates. Accepted / reached
    is an unbiased estimate of the conditional acceptance if plans do not depend on the tokens that
    they decide about; the Kaplan-Meier product is then the survival. Accepted / drafted would be
    biased.

    Args:
        rounds: Rounds in which drafts were requested.
        reached: Rounds by depth, the root's children first.
        accepted: The same.
    """

    rounds: float = 0.0
    reached: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def update(
        self, num_examined: int, num_accepted: int, keep: float, *, is_asked: bool = True
    ) -> "DepthCounts":
        """Return the counts with another round.

        Args:
            num_examined: Depths that were reached; 0 if nothing was drafted.
            num_accepted: Depths that were accepted.
            keep: Factor on the weight of earlier rounds.
            is_asked: Whether drafts were requested.
        """
        size = max(num_examined, len(self.reached))
        return DepthCounts(
            keep * self.rounds + is_asked,
            _counted(self.reached, size, num_examined, keep),
            _counted(self.accepted, size, num_accepted, keep),
        )

    def acceptance(self, depths: int, prior: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return the acceptance at the first depths, given that they are reached.

        Args:
            depths: Number of depths.
            prior: Prior acceptance by depth. Without it, each depth starts from the estimate of the
                depth above.
        """
        estimates: list[float] = []
        estimate, ratio = _FIRST_ACCEPTANCE, 1.0
        missing = (0.0,) * (depths - len(self.reached))
        counts = zip(self.reached + missing, self.accepted + missing, strict=True)
        for depth, (reached, accepted) in zip(range(depths), counts, strict=False):
            # A request above the prior at one depth is expected to be above it at the next.
            expected = estimate if prior is None else min(1.0, ratio * prior[depth])
            estimate = (accepted + _PRIOR_WEIGHT * expected) / (reached + _PRIOR_WEIGHT)
            ratio = estimate / prior[depth] if prior is not None else 1.0
            estimates.append(estimate)
        return tuple(estimates)

    def hit_rate(self, prior: float = 1.0) -> float:
        """Return the share of requested drafts that had nodes: a lookup finds no match in most rounds."""
        drafted = self.reached[0] if self.reached else 0.0
        return (drafted + prior) / (self.rounds + 1.0)


def _counted(counts: Sequence[float], size: int, depth: int, keep: float) -> tuple[float, ...]:
    """Return counts of `size` depths with another round, which counts for the first `depth`."""
    old = (*counts, *(0.0,) * (size - len(counts)))
    return tuple(keep * count + (place < depth) for place, count in enumerate(old))


@dataclass(frozen=True, slots=True)
class RecentCounts:
    """Counts of about the last fifteen rounds, shrunk to those of about the last hundred."""

    recent: DepthCounts = DepthCounts()
    usual: DepthCounts = DepthCounts()

    def update(self, num_examined: int, num_accepted: int, share: float) -> "RecentCounts":
        """Return the counts with a request's share of a round; see `DepthCounts.update`."""
        return RecentCounts(
            self.recent.update(num_examined, num_accepted, _RECENT_KEEP**share),
            self.usual.update(num_examined, num_accepted, _USUAL_KEEP),
        )

    def aged(self, rounds: float) -> "RecentCounts":
        """Return the counts after rounds that say nothing about drafts."""
        recent = self.recent.update(0, 0, _RECENT_KEEP**rounds, is_asked=False)
        return RecentCounts(recent, self.usual)

    def tokens(self, depths: int) -> list[float]:
        """Return the expected tokens of a round that drafts to the depths 0, 1, ..., `depths`."""
        return expected_tokens(self.recent.acceptance(depths, self.usual.acceptance(depths)))

    @property
    def hit_rate(self) -> float:
        """The share of requested drafts that have nodes."""
        return self.recent.hit_rate(self.usual.hit_rate())

    @property
    def doubt(self) -> float:
        """Half a standard error of the expected tokens, as a share of them."""
        return _DOUBT / math.sqrt(self.recent.rounds + 1.0)


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Return the expected tokens of a round for the depths 0, 1, ...: 1 plus the sum of the survivals."""
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


def speeds(acceptance: float, seconds: Sequence[float]) -> list[float]:
    """Return the expected tokens per second of depths 0, 1, ... that take these seconds."""
    tokens = expected_tokens((acceptance,) * (len(seconds) - 1))
    return [count / spent for count, spent in zip(tokens, seconds, strict=True)]


def argmax(values: Sequence[float]) -> int:
    """Return the index of the largest value; the first index if several are equal."""
    return max(range(len(values)), key=values.__getitem__)
