"""A window that grows after full acceptance and shrinks after a rejection."""

from dataclasses import dataclass

from monge.control.base import Reads, RoundInfo, SharedState, SoloController, check_windows
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.verdict import StepRecord


@dataclass(frozen=True, slots=True)
class Fsm(SoloController[int]):
    """A finite-state machine: the window grows after full acceptance, and shrinks otherwise.

    Args:
        first: Window of the first round.
        up: Added when the deepest node was accepted.
        down: Subtracted otherwise.
        min_window: Smallest window; at least 1, since a window of 0 would learn nothing and stay.
        max_window: Largest window.

    Reference:
        Liu, Park and Shen, ACL 2025, paper 482 (state-based adaptation).
    """

    first: int = 4
    up: int = 1
    down: int = 1
    min_window: int = 1
    max_window: int = 8

    reads = frozenset({Reads.ACCEPTED})

    def __post_init__(self) -> None:
        check_windows(
            "fsm", lowest=max(self.min_window, 0), highest=self.max_window, first=self.first
        )
        if self.up < 1 or self.down < 1 or self.min_window < 1:
            raise OptionError(
                f"fsm: up, down and min_window must be at least 1; got {self.up}, "
                f"{self.down}, {self.min_window}"
            )

    def init(self, shared: SharedState) -> int:
        return self.first

    def plan_one(self, state: int, info: RoundInfo, context_length: int, draws: Draws) -> DraftPlan:
        return DraftPlan(max_depth=state)

    def update(self, state: int, record: StepRecord) -> int:
        if record.depth == 0:  # nothing was drafted, so nothing was learned
            return state
        if record.num_accepted == record.depth:
            return min(state + self.up, self.max_window)
        return max(state - self.down, self.min_window)
