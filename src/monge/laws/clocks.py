"""Shared noise: clocks that drafter and verifier read alike, addressed by place and not by the order of reading."""

from jaxtyping import Float64
from torch import Tensor

from monge.core.errors import MongeError
from monge.laws.draws import ClockDraws, Draws
from monge.laws.law import Law


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
