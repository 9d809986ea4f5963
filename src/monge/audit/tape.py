"""The random numbers of a recorded request, and the nodes that drew their children with them."""

from array import array
from typing import Any, Final

from jaxtyping import Float64
from torch import Tensor

from monge.audit.certify_report import MismatchError
from monge.core.draws import ClockDraws, Draws, RequestDraws
from monge.core.law import Law
from monge.core.proposal import ChildDraws, Deterministic, Proposal

_FARTHEST: Final = 1 << 20


class Tape(ClockDraws, ChildDraws):
    """The draws of a seed and row as of `RequestDraws`, which can be read again from any place.

    Attributes:
        place: Uniforms before the next one.
        rounds: Fields of each round in the record: `start`, the uniforms drawn before it, and `draws`,
            the nodes that drew their children, in order. The verdict completes it with the tree, the
            laws, its uniforms and itself, with arrays in memory.
        verifier: Text of the verifier that decided; empty before.
        num_bytes: Memory of the arrays in these rounds.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        self._own, self._drawn = RequestDraws(seed, row), array("d")
        self.place = 0
        self.rounds: list[dict[str, Any]] = []
        self.verifier = ""
        self.num_bytes = 0

    def seek(self, place: int) -> None:
        """Go to a place of the stream.

        Raises:
            MismatchError: If no run gets there.
        """
        if not 0 <= place <= len(self._drawn) + _FARTHEST:
            raise MismatchError("draws", f"there is no uniform {place} in this run")
        self.place = place

    def uniform(self) -> float:
        (number,) = self.peek(1)
        self.place += 1
        return number

    def bernoulli(self, prob: float) -> bool:
        return self.uniform() < prob

    def categorical(self, law: Law) -> int:
        return law.quantile(self.uniform())

    def peek(self, count: int) -> list[float]:
        """See `PeekableDraws`."""
        while len(self._drawn) < self.place + count:
            self._drawn.append(self._own.uniform())
        return self._drawn[self.place : self.place + count].tolist()

    @property
    def num_drawn(self) -> int:
        """See `core.draws.num_drawn`."""
        return self.place

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
        return self._own.clocks(depth, draft, num_tokens)

    def for_plans(self) -> Draws:
        return self._own.for_plans()

    def move_to(self, place: int) -> None:
        self._own.move_to(place)
        self.rounds.append({"start": self.place, "draws": []})

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        start, tokens = self.place, proposal.draw(self)
        if not isinstance(proposal, Deterministic):
            self.rounds[-1]["draws"].append(
                {"path": path, "start": start, "stop": self.place, "tokens": tokens}
            )
        return tokens
