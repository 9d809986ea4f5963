"""Shared noise: clocks that drafter and verifier read alike, addressed by place and not by the order of reading."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from monge.core.draws import Draws, SeededDraws, random_numbers
from monge.core.errors import MongeError, OptionError
from monge.core.law import Law
from monge.core.proposal import Proposal

_CLOCKS: Final = 1  # `use` of the generator; 0 is the stream of uniforms


class ClockDraws(ABC):
    """A source of randomness with clocks.

    Clock `(depth, draft, token)` is an exponential variable of mean one, independent of all others and of every draw. Depth
    counts from the last committed token, so what is read at a place of the text does not depend on how rounds were cut.
    """

    @abstractmethod
    def clocks(self, depth: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
        """Clocks of tokens 0 .. num_tokens - 1, for the token that follows a node at `depth` (0 for the root)."""

    @abstractmethod
    def move_to(self, place: int) -> None:
        """Say how many tokens are committed."""


class RequestDraws(SeededDraws, ClockDraws):
    """The draws of one request: a stream of its own, and clocks under the same seed and row.

    Args:
        seed: As for `SeededDraws`.
        row: Likewise.

    Raises:
        OptionError: As `check_seed`.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        super().__init__(seed, row)
        self._seed, self._row, self._place = seed, row, 0

    def move_to(self, place: int) -> None:
        self._place = place

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
        return keyed_clocks(self._seed, self._row, self._place + depth, draft, num_tokens)


def keyed_clocks(seed: int, row: int, place: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
    """Clocks of a place of the text: numbers of their own for every place and draft."""
    uniforms = random_numbers(seed, row, place=place, draft=draft, use=_CLOCKS).random(num_tokens)
    return torch.from_numpy(-np.log1p(-uniforms))


def first_token(clocks: Float64[Tensor, " vocab"], law: Law) -> int:
    """`argmin_i S_i / p_i` over the support of a law: a draw from it, if clock i is exponential."""
    part = law.sparse()
    rings = clocks[part.token_ids.cpu()] / part.probs.cpu()
    return int(part.token_ids[int(rings.argmin())])


def num_clocks(law: Law) -> int:
    """Tokens that need a clock."""
    return int(law.sparse().token_ids[-1]) + 1


def clock_draws(draws: Draws) -> ClockDraws:
    """The draws, if they have clocks.

    Raises:
        MongeError: If they have none.
    """
    if not isinstance(draws, ClockDraws):
        raise MongeError(
            f"{type(draws).__name__} has no clocks to share; the verifier 'gumbel' and the children 'shared' need the draws "
            "of a request with a seed"
        )
    return draws


@dataclass(frozen=True, slots=True)
class SharedClocks(Proposal):
    """`width` draws from `law`, draft k by the race of the clocks `(depth, k, .)`, which the verifier knows.

    Given what is committed and drafted above, the draws are independent; but they are not independent of the verifier's noise,
    so only rules made for it, and those that never look at the candidates, are exact.
    """

    law: Law
    width: int = 1
    depth: int = 0

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 0:
            raise OptionError(f"SharedClocks: need width >= 1 and depth >= 0; got {self.width} and {self.depth}")

    def at_depth(self, depth: int) -> "SharedClocks":
        return replace(self, depth=depth)

    def draw(self, draws: Draws) -> tuple[int, ...]:
        source, size = clock_draws(draws), num_clocks(self.law)
        return tuple(first_token(source.clocks(self.depth, draft, size), self.law) for draft in range(self.width))
