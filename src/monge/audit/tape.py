"""The random numbers of a recorded request, and the nodes that drew their children with them."""

from array import array
from dataclasses import dataclass, field
from typing import Any, Final

from jaxtyping import Float64
from torch import Tensor

from monge.audit.certify_report import MismatchError
from monge.core.draws import ClockDraws, Draws, RequestDraws
from monge.core.law import Law
from monge.core.proposal import ChildDraws, Deterministic, Proposal

_FARTHEST: Final = 1 << 20


@dataclass(slots=True, kw_only=True)
class RoundTape:
    """The record of one round.

    Attributes:
        start: Uniforms that were drawn before the round.
        children: Nodes that drew their children, in order: path from the root, uniforms drawn
            before and after, and children with repeats.
        decided: Fields of the record that the verdict completes: tree, laws, uniforms and verdict,
            with arrays in memory. Empty if there was no verdict.
        verifier: Text of the verifier that decided.
    """

    start: int
    children: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    decided: dict[str, Any] = field(default_factory=dict[str, Any])
    verifier: str = ""


class Tape(ClockDraws, ChildDraws):
    """The draws of a seed and row as of `RequestDraws`, which can be read again from any place.

    Attributes:
        place: Uniforms before the next one.
        rounds: One tape a round.
        num_bytes: Memory of the arrays on these tapes.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        self._own, self._drawn = RequestDraws(seed, row), array("d")
        self.place = 0
        self.rounds: list[RoundTape] = []
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
        self.rounds.append(RoundTape(start=self.place))

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        start, tokens = self.place, proposal.draw(self)
        if not isinstance(proposal, Deterministic):
            self.rounds[-1].children.append(
                {"path": path, "start": start, "stop": self.place, "tokens": tokens}
            )
        return tokens
