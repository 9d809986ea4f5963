"""Shared noise: clocks that drafter and verifier read alike, addressed by place and not by the order of reading."""

from dataclasses import dataclass, replace

from jaxtyping import Float64
from torch import Tensor

from monge.core.draws import ClockDraws, Draws
from monge.core.errors import MongeError, OptionError
from monge.core.law import Law
from monge.core.proposal import OneLaw


def first_token(clocks: Float64[Tensor, " vocab"], law: Law) -> int:
    """Return `argmin_i S_i / p_i` over the support of a law: a draw from it, if clock i is exponential."""
    part = law.sparse()
    rings = clocks[part.token_ids.cpu()] / part.probs.cpu()
    return int(part.token_ids[int(rings.argmin())])


def num_clocks(law: Law) -> int:
    """Return the number of tokens that need a clock."""
    return int(law.sparse().token_ids[-1]) + 1


def clock_draws(draws: Draws) -> ClockDraws:
    """Return the draws, if they have clocks.

    Raises:
        MongeError: If they have none.
    """
    if not isinstance(draws, ClockDraws):
        raise MongeError(
            f"{type(draws).__name__} has no clocks to share; the verifier 'gumbel' and the "
            "children 'shared' need the draws of a request with a seed"
        )
    return draws


@dataclass(frozen=True, slots=True)
class SharedClocks(OneLaw):
    """`width` draws from `law`, draft k by the race of the clocks `(depth, k, .)`, which the verifier knows.

    Given what is committed and drafted above, the draws are independent; but they are not
    independent of the verifier's noise, so only rules made for it, and those that never look at the
    candidates, are exact.
    """

    law: Law
    width: int = 1
    depth: int = 0

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 0:
            raise OptionError(
                f"SharedClocks: need width >= 1 and depth >= 0; got {self.width} and {self.depth}"
            )

    def at_depth(self, depth: int) -> "SharedClocks":
        return replace(self, depth=depth)

    def draw(self, draws: Draws) -> tuple[int, ...]:
        source, size = clock_draws(draws), num_clocks(self.law)
        return tuple(
            first_token(source.clocks(self.depth, draft, size), self.law)
            for draft in range(self.width)
        )
