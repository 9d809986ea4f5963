"""State machines: the window grows after full acceptance and shrinks after a rejection."""

from dataclasses import dataclass, field

from monge.control.base import Reads, RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws


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
        check_bounds("fsm", up=self.up, down=self.down, max_window=self.max_window)
        check_bounds("fsm", 1, self.max_window, min_window=self.min_window)
        check_bounds("fsm", self.min_window, self.max_window, first=self.first)

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


@dataclass(frozen=True, slots=True)
class CachedState:
    """State of a request.

    Args:
        window: The state machine's window.
        ending: The last committed tokens.
        accepted: Average accepted length after an ending, least recently used first.
    """

    window: int
    ending: tuple[int, ...] = ()
    accepted: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])


@dataclass(frozen=True, slots=True)
class CachedFsm(SoloController[CachedState]):
    """Draft one token more than was accepted after the same ending; else a state machine.

    The longest known ending wins. Averages are exponential, with weight `rate` for the last round.

    Args:
        machine: Settings of the state machine: first window, up, down, smallest and largest window.
        max_ending: Longest ending, in tokens.
        min_ending: Shortest ending.
        capacity: Largest number of endings; the least recently used ending is dropped first.
        rate: Weight of the last round in an average.

    Reference:
        Liu, Park and Shen, ACL 2025, paper 482, names a cache-enhanced state machine without
        specifying it; this is our design.
    """

    machine: tuple[int, int, int, int, int] = (4, 1, 1, 1, 8)
    max_ending: int = 4
    min_ending: int = 2
    capacity: int = 256
    rate: float | int = 0.5

    reads = frozenset({Reads.ACCEPTED, Reads.TOKENS})

    def __post_init__(self) -> None:
        self._fsm()
        check_bounds("cached_fsm", max_ending=self.max_ending, capacity=self.capacity)
        check_bounds("cached_fsm", 1, self.max_ending, min_ending=self.min_ending)
        check_bounds("cached_fsm", 0, 1, rate=self.rate)
        if self.rate == 0.0:
            raise OptionError("cached_fsm: rate must be larger than 0; got 0")

    def init(self, shared: SharedState) -> CachedState:
        return CachedState(self._fsm().init(shared))

    def plan_one(
        self, state: CachedState, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        fsm, window = self._fsm(), state.window
        known = [state.accepted[key] for key in self._keys(state.ending) if key in state.accepted]
        if known:
            window = max(fsm.min_window, min(round(known[0]) + 1, fsm.max_window))
        return DraftPlan(max_depth=window)

    def update(self, state: CachedState, record: StepRecord) -> CachedState:
        accepted = dict(state.accepted)
        if record.depth > 0:
            for key in self._keys(state.ending):
                old = accepted.pop(key, float(record.num_accepted))
                accepted[key] = old + self.rate * (record.num_accepted - old)
            while len(accepted) > self.capacity:
                del accepted[next(iter(accepted))]
        ending = (*state.ending, *record.token_ids)[-self.max_ending :]
        return CachedState(self._fsm().update(state.window, record), ending, accepted)

    def _keys(self, ending: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the endings of the text, the longest first."""
        sizes = range(min(self.max_ending, len(ending)), self.min_ending - 1, -1)
        return [ending[-size:] for size in sizes]

    def _fsm(self) -> Fsm:
        return Fsm(*self.machine)
