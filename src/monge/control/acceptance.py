"""Acceptance by depth, estimated from finished rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.verdict import StepRecord

PRIOR_WEIGHT = 2.0
"""Rounds that earlier knowledge counts for; it is small, so that a useless drafter is detected
soon."""
REQUEST_KEEP = 0.9
"""Factor on the weight of a round with each later round, in the acceptance of a request."""
SHARED_KEEP = 0.99
"""The same factor, in the acceptance of all requests."""
_FIRST_ACCEPTANCE = 0.75
_RAREST = 3e-4
"""Smallest estimate of acceptance, and of rejection, that is used for other depths."""


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """How often each depth was reached and accepted; old rounds count less.

    A depth is reached if all nodes above it were accepted and it had candidates. Accepted / reached
    is an unbiased estimate of the conditional acceptance if plans do not depend on the tokens that
    they decide about; the Kaplan-Meier product is then the survival. Accepted / drafted would be
    biased.

    Args:
        reached: By depth, the root's children first.
        accepted: Likewise.
    """

    reached: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def update(self, record: StepRecord, keep: float) -> "DepthCounts":
        """The counts with one more round; earlier ones count `keep` times as much as before."""
        return self.seen([(len(record.examined), record.num_accepted)], keep)

    def seen(self, drafts: Sequence[tuple[int, int]], keep: float) -> "DepthCounts":
        """The same with some drafts, the latest last.

        Args:
            drafts: For each draft, the number of depths that were reached and accepted.
            keep: Factor on the weight of a draft with each later one.
        """
        if not drafts:
            return self
        kept = keep ** len(drafts)
        missing = [0.0] * (max(examined for examined, _ in drafts) - len(self.reached))
        reached = [kept * count for count in self.reached] + missing
        accepted = [kept * count for count in self.accepted] + missing
        weight = 1.0
        for examined, taken in reversed(drafts):
            for depth in range(examined):
                reached[depth] += weight
            for depth in range(taken):
                accepted[depth] += weight
            weight *= keep
        return DepthCounts(tuple(reached), tuple(accepted))

    def aged(self, keep: float) -> "DepthCounts":
        """The same shares as weaker evidence."""
        return DepthCounts(tuple(keep * count for count in self.reached), tuple(keep * count for count in self.accepted))

    def acceptance(self, depths: int, prior: Sequence[float] | None = None, weight: float = PRIOR_WEIGHT) -> tuple[float, ...]:
        """Acceptance at the first depths.

        Args:
            depths: Number of depths.
            prior: Prior acceptance by depth. Without it, each depth starts from the estimate of the
                depth above.
            weight: Rounds that the prior counts for.
        """
        estimates: list[float] = []
        estimate, ratio, known = _FIRST_ACCEPTANCE, 1.0, len(self.reached)
        for depth in range(depths):
            usual = 0.0 if prior is None else _odds(prior[depth])
            moved = usual * ratio
            expected = estimate if prior is None else moved / (1.0 + moved)
            reached, accepted = (self.reached[depth], self.accepted[depth]) if depth < known else (0.0, 0.0)
            estimate = (accepted + weight * expected) / (reached + weight)
            estimates.append(estimate)
            if prior is not None:
                # A request above the prior at one depth is expected to be above it at the next.
                ratio = _odds(estimate) / usual
        return tuple(estimates)


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Expected tokens of a round for the windows 0, 1, ..: one more than the sum of the survivals."""
    tokens, reach = [1.0], 1.0
    for share in acceptance:
        reach *= share
        tokens.append(tokens[-1] + reach)
    return tokens


def _odds(prob: float) -> float:
    """Return bounded odds: an event that was never seen is not impossible."""
    bounded = _RAREST if prob < _RAREST else 1.0 - _RAREST if prob > 1.0 - _RAREST else prob
    return bounded / (1.0 - bounded)
