"""The random numbers of a recorded request, from any place of their stream on."""

from typing import Final

from torch import Tensor

from monge.audit.mismatch import MismatchError
from monge.core.draws import ClockDraws, Draws, RequestDraws
from monge.core.law import Law

_FARTHEST: Final = 1 << 20


class Tape(ClockDraws):
    """The uniforms of a seed and row.

    Args:
        seed: As for `RequestDraws`.
        row: Likewise.

    Attributes:
        place: Uniforms before the next one.
    """

    def __init__(self, seed: int, row: int) -> None:
        self._own, self._drawn = RequestDraws(seed, row), list[float]()
        self.place = 0

    def seek(self, place: int) -> None:
        """Go to a place of the stream.

        Raises:
            MismatchError: If no run gets there.
        """
        if not 0 <= place <= len(self._drawn) + _FARTHEST:
            raise MismatchError("draws", f"there is no uniform {place} in this run")
        self.place = place

    def uniform(self) -> float:
        while len(self._drawn) <= self.place:
            self._drawn.append(self._own.uniform())
        self.place += 1
        return self._drawn[self.place - 1]

    def bernoulli(self, prob: float) -> bool:
        return self.uniform() < prob

    def categorical(self, law: Law) -> int:
        return law.quantile(self.uniform())

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Tensor:
        return self._own.clocks(depth, draft, num_tokens)

    def move_to(self, place: int) -> None:
        self._own.move_to(place)

    def for_plans(self) -> Draws:
        return self._own.for_plans()
