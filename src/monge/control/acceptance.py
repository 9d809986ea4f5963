"""Acceptance by depth, estimated from finished rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_FIRST_ACCEPTANCE: Final = 0.75
"""Acceptance of every depth before anything is known."""
_PRIOR_WEIGHT: Final = 4.0
"""Rounds that earlier knowledge counts for. It is small, so that a useless drafter is found soon."""


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """How often drafting was asked for, and each depth was reached and accepted.

    A depth is reached if all nodes above it were accepted and it had candidates. Accepted / reached
    is an unbiased estimate of the conditional acceptance if plans do not depend on the tokens that
    they decide about; the Kaplan-Meier product is then the survival. Accepted / drafted would be
    biased.

    Args:
        asked: Rounds in which the drafter was asked.
        reached: Rounds by depth, the root's children first.
        accepted: The same.
    """

    asked: float = 0.0
    reached: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def update(self, num_examined: int, num_accepted: int, keep: float) -> "DepthCounts":
        """Return the counts with one more round.

        Args:
            num_examined: Depths that were reached; 0 if nothing was drafted.
            num_accepted: Depths that were accepted.
            keep: Factor on the weight of earlier rounds.
        """
        missing = (0.0,) * (num_examined - len(self.reached))
        return DepthCounts(
            keep * self.asked + 1.0,
            tuple(
                keep * count + (depth < num_examined)
                for depth, count in enumerate(self.reached + missing)
            ),
            tuple(
                keep * count + (depth < num_accepted)
                for depth, count in enumerate(self.accepted + missing)
            ),
        )

    def aged(self, keep: float) -> "DepthCounts":
        """Return the same shares as weaker evidence."""
        return DepthCounts(
            keep * self.asked,
            tuple(keep * count for count in self.reached),
            tuple(keep * count for count in self.accepted),
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
        for depth in range(depths):
            # A request above the prior at one depth is expected to be above it at the next.
            expected = estimate if prior is None else min(1.0, ratio * prior[depth])
            is_known = depth < len(self.reached)
            reached = self.reached[depth] if is_known else 0.0
            accepted = self.accepted[depth] if is_known else 0.0
            estimate = (accepted + _PRIOR_WEIGHT * expected) / (reached + _PRIOR_WEIGHT)
            estimates.append(estimate)
            ratio = estimate / prior[depth] if prior is not None else 1.0
        return tuple(estimates)

    def hit_rate(self, prior: float = 1.0) -> float:
        """Return the share of rounds that drafted when asked: a lookup finds no match in most rounds."""
        drafted = self.reached[0] if self.reached else 0.0
        return (drafted + prior) / (self.asked + 1.0)


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Return the expected tokens of a round for the depths 0, 1, ...: one more than the sum of the survivals."""
    tokens, reach = [1.0], 1.0
    for share in acceptance:
        reach *= share
        tokens.append(tokens[-1] + reach)
    return tokens
