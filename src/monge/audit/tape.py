"""The random numbers of a recorded request, and the nodes that drew their children with them."""

from array import array
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from jaxtyping import Float64
from torch import Tensor

from monge.audit.mismatch import MismatchError
from monge.core.child_draws import ChildDraws
from monge.core.draws import ClockDraws, Draws, RequestDraws
from monge.core.law import Law
from monge.core.proposal import Deterministic, Proposal

_FARTHEST: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildrenDrawn:
    """The children that one node drew.

    Args:
        path: Drafted tokens from the root's child down to the node.
        start: Uniforms of the request that were drawn before.
        stop: The same afterwards.
        tokens: The children in drawing order, repeats kept.
    """

    path: tuple[int, ...]
    start: int
    stop: int
    tokens: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class RoundTape:
    """The record of one round.

    Attributes:
        start: Uniforms that were drawn before the round.
        children: Nodes that drew their children, in order.
        decided: Fields of the record that the verdict completes: tree, laws, uniforms and verdict,
            with arrays in memory. Empty if there was no verdict.
        num_bytes: Memory of these arrays.
        verifier: Text of the verifier that decided.
    """

    start: int
    children: list[ChildrenDrawn] = field(default_factory=list[ChildrenDrawn])
    decided: dict[str, Any] = field(default_factory=dict[str, Any])
    num_bytes: int = 0
    verifier: str = ""


@runtime_checkable
class Follower(Protocol):
    """Makes a request take the way of its record."""

    def begin_round(self) -> None:
        """Go to the next recorded round."""
        ...

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        """Return the recorded children of a node."""
        ...


class Tape(ClockDraws, ChildDraws):
    """The draws of a seed and row, which can be read again from any place.

    Args:
        seed: As for `RequestDraws`.
        row: Likewise.
        follower: Draws the children of nodes; by default the proposals do, and are taped.

    Attributes:
        place: Uniforms before the next one.
        rounds: One tape a round.
        num_bytes: Memory of the arrays on these tapes.
    """

    def __init__(self, seed: int, row: int = 0, follower: Follower | None = None) -> None:
        self._own, self._follower = RequestDraws(seed, row), follower
        self._drawn = array("d")
        self.place = self._num_followed = 0
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
        """See `CountedDraws`; children that a follower draws count as well."""
        return self.place + self._num_followed

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
        return self._own.clocks(depth, draft, num_tokens)

    def for_plans(self) -> Draws:
        return self._own.for_plans()

    def move_to(self, place: int) -> None:
        self._own.move_to(place)
        self.rounds.append(RoundTape(start=self.place))
        if self._follower is not None:
            self._follower.begin_round()

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        if self._follower is not None:
            self._num_followed += 1
            return self._follower.draw_children(path, proposal)
        start, tokens = self.place, proposal.draw(self)
        if not isinstance(proposal, Deterministic):
            self.rounds[-1].children.append(
                ChildrenDrawn(path=path, start=start, stop=self.place, tokens=tokens)
            )
        return tokens
