"""The same plan every round."""

from dataclasses import dataclass

from monge.control.base import Controller
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Controller[None]):
    """The same limits every round; without settings, the tree builder's own.

    Args:
        max_depth: Deepest node, or `None` for the builder's own.
        max_nodes: Drafted nodes, or `None` for the builder's own.
    """

    max_depth: int | None = None
    max_nodes: int | None = None

    def init(self) -> None:
        return None

    def plan(self, state: None, draws: Draws) -> DraftPlan:
        return DraftPlan(max_depth=self.max_depth, max_nodes=self.max_nodes)

    def update(self, state: None, record: StepRecord) -> None:
        return None
