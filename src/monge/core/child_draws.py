"""Draws that know which node they draw for."""

from abc import ABC, abstractmethod

from monge.core.proposal import Proposal


class ChildDraws(ABC):
    """A source of randomness that draws all children of a node at once, and is told where the node is.

    Production never needs this: a proposal draws its own children. Replay does: its candidates are
    drawn *given* a text that is known already, and for that it must know which nodes the text
    passes.
    """

    @abstractmethod
    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        """All children of a node, in drawing order, as `Proposal.draw` gives them.

        Args:
            path: Drafted tokens from the root's child down to the node; empty for the root.
            proposal: How the children are drawn.
        """
