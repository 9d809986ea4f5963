"""Facts about the drafters of a pool, and results of their shadow drafts."""

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A drafter of a pool, as a controller sees it.

    Args:
        name: Its name in plans.
        max_depth: Deepest node it may draft.
        runs_network: True if drafting costs forwards. Others make a shadow draft in every round.
        max_length: Longest text that it drafts for; `None` for unbounded.
    """

    name: str
    max_depth: int
    runs_network: bool
    max_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterfactualDraft:
    """The tokens that a drafter would have had accepted in a round, once the text is known.

    Args:
        drafter: Its name in the pool.
        position: Tokens of the text before the round.
        num_nodes: Nodes that it would have drafted.
        factors: Along the text that followed, by depth: 1 where the token was proposed, 0 at the
            first that was not (the last entry then); for a candidate drawn from a law q, `min(1,
            q(x)/p(x))`.
    """

    drafter: str
    position: int
    num_nodes: int
    factors: tuple[float, ...]

    @property
    def expected_tokens(self) -> float:
        """Tokens that the round would have committed, the correction or bonus token included.

        One more than the sum of the products `g_1 .. g_k` of the factors. On a text drawn from the
        target its mean is the expected length of a round of single-draft verification; with factors
        that are averaged over tokens it is not, where acceptance depends on earlier tokens.
        """
        return 1.0 + math.fsum(accumulate(self.factors, mul))
