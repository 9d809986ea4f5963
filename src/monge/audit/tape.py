"""The random numbers of a recorded request, and the nodes that drew their children with them."""

from array import array
from typing import Any, Final

from monge.audit.certify_report import MismatchError
from monge.core.draws import RequestDraws
from monge.core.proposal import ChildDraws, Deterministic, Proposal

_FARTHEST: Final = 1 << 20


class Tape(RequestDraws, ChildDraws):
    """The draws of a seed and row, which can be read again from any place.

    Attributes:
        num_drawn: Uniforms before the next one.
        rounds: Fields of each round in the record: `start`, the uniforms drawn before it, and `draws`,
            the nodes that drew their children, in order. The verdict completes it with the tree, the
            laws, its uniforms and itself, with arrays in memory.
        verifier: Text of the verifier that decided; empty before.
        num_bytes: Memory of the arrays in these rounds.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        super().__init__(seed, row)
        self._numbers = array("d")
        self.rounds: list[dict[str, Any]] = []
        self.verifier = ""
        self.num_bytes = 0

    def seek(self, place: int) -> None:
        """Go to a place of the stream.

        Raises:
            MismatchError: If no run gets there.
        """
        if not 0 <= place <= len(self._numbers) + _FARTHEST:
            raise MismatchError("draws", f"there is no uniform {place} in this run")
        self.num_drawn = place

    def uniform(self) -> float:
        (number,) = self.peek(1)
        self.num_drawn += 1
        return number

    def peek(self, count: int) -> list[float]:
        end = self.num_drawn + count
        while len(self._numbers) < end:
            self._numbers.append(next(self._uniforms))
        return self._numbers[self.num_drawn : end].tolist()

    def move_to(self, place: int) -> None:
        super().move_to(place)
        self.rounds.append({"start": self.num_drawn, "draws": []})

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        start, tokens = self.num_drawn, proposal.draw(self)
        if not isinstance(proposal, Deterministic):
            self.rounds[-1]["draws"].append(
                {"path": path, "start": start, "stop": self.num_drawn, "tokens": tokens}
            )
        return tokens
