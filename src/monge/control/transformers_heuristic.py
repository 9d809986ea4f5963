"""The window schedule of `transformers`' assisted generation."""

from dataclasses import dataclass

from monge.control.base import Reads, RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord


@dataclass(frozen=True, slots=True)
class TransformersHeuristic(SoloController[int]):
    """Two more tokens after full acceptance, one fewer otherwise, never fewer than one.

    The schedules `heuristic` and `heuristic_transient` of `num_assistant_tokens_schedule`: there
    the first is carried from one call to the next; here every request starts anew, as in the
    second.

    Args:
        num_draft_tokens: Window of the first round.

    Reference:
        `transformers`, `AssistedCandidateGenerator.update_candidate_strategy`.
    """

    num_draft_tokens: int = 5

    reads = frozenset({Reads.ACCEPTED})

    def __post_init__(self) -> None:
        check_bounds("transformers_heuristic", num_draft_tokens=self.num_draft_tokens)

    def init(self, shared: SharedState) -> int:
        return self.num_draft_tokens

    def plan_one(self, state: int, info: RoundInfo, context_length: int, draws: Draws) -> DraftPlan:
        return DraftPlan(max_depth=state)

    def update(self, state: int, record: StepRecord) -> int:
        if record.depth == 0:
            return state
        # The tree builder or the end of the request may draft less than the window.
        drafted = min(state, record.depth)
        return drafted + 2 if record.num_accepted == record.depth else max(1, drafted - 1)
