"""The same plan every round."""

from dataclasses import dataclass

from monge.control.base import RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(SoloController[None]):
    """The same limits every round; without settings, the tree builder's own.

    Args:
        max_depth: Deepest node, or `None` for the builder's own.
        max_nodes: Drafted nodes, or `None` for the builder's own.
        model_free_depth: Deepest node of the model-free drafters of a pool, or `None` for
            `max_depth`; 0 excludes them. It is an error if there are none.

    Reference:
        The fixed number of draft tokens of Leviathan et al., arXiv 2211.17192.
    """

    max_depth: int | None = None
    max_nodes: int | None = None
    model_free_depth: int | None = None

    def __post_init__(self) -> None:
        self._plan()

    def init(self, shared: SharedState) -> None:
        has_lookup = not all(member.runs_network for member in shared.members)
        if self.model_free_depth is not None and not has_lookup:
            raise OptionError(
                f"fixed: model_free_depth={self.model_free_depth} limits model-free drafters of a "
                "pool, and there are none; leave it out, or use drafter='pool(ngram, model)'"
            )

    def plan_one(
        self, state: None, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        return self._plan()

    def update(self, state: None, record: StepRecord) -> None:
        return None

    def _plan(self) -> DraftPlan:
        return DraftPlan(
            max_depth=self.max_depth,
            max_nodes=self.max_nodes,
            model_free_depth=self.model_free_depth,
        )
