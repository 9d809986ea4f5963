"""How far requests differ in what is accepted: what earlier ones did counts for the more, the less they do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_KEEP: Final = 0.95  # weight that a group of rounds keeps with every later one
_FIRST_ROUNDS: Final = 50.0  # rounds that the first guess counts for
_FIRST_WEIGHT: Final = 8.0
_WEIGHTS: Final = (4.0, 48.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """Variance of first-depth acceptance between groups of rounds of a request, beyond what chance makes of so few rounds.

    With a share p accepted on average and a variance v of that share between groups, what is known of all is worth
    p (1 - p) / v rounds of a group's own: the weight of a beta law's mean by its moments.

    Args:
        excess: Sum over groups of n ((k / n - p)^2 - p (1 - p) / n), for k of n accepted, the latest counting most.
        rounds: Sum of n - 1: in expectation a group's excess is so many variances.
        noise: p (1 - p), with the last p.

    Reference:
        Method of moments for the beta-binomial law: Kleinman, "Proportions with extraneous variance", JASA 68, 1973.
    """

    excess: float = _FIRST_ROUNDS * 0.25 / _FIRST_WEIGHT
    rounds: float = _FIRST_ROUNDS
    noise: float = 0.25

    @property
    def weight(self) -> float:
        """Rounds that the acceptance of all counts for in that of one request."""
        fewest, most = _WEIGHTS
        scaled = self.noise * self.rounds
        return most if self.excess * most <= scaled else max(fewest, scaled / self.excess)

    def seen(self, drafts: Sequence[tuple[int, int]], share: float) -> "Spread":
        """After a group of rounds.

        Args:
            drafts: Of each round, how many depths were reached, and how many accepted.
            share: Of first candidates that was accepted on average, in earlier groups.
        """
        reached = sum(examined > 0 for examined, _ in drafts)
        if reached < 2:  # one round says nothing about a group
            return self
        accepted, noise = sum(taken > 0 for _, taken in drafts), share * (1.0 - share)
        excess = reached * (accepted / reached - share) ** 2 - noise
        return Spread(_KEEP * self.excess + excess, _KEEP * self.rounds + reached - 1, noise)
