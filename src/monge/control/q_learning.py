"""Tabular Q-learning of the window."""

from dataclasses import dataclass, field
from typing import Final

from monge.control.base import Reads, RoundInfo, SharedState, SoloController, draw_index, latency_of
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws

Situation = tuple[int, int, int]
"""Share of the last window that was accepted, in quarters (-1 for a window of 0); that window; and
the logarithm of the batch size."""

_RATE_MEMORY: Final = 0.98


@dataclass(frozen=True, slots=True)
class QTable:
    """Values of every window in every situation, and tokens and seconds of the recent past."""

    values: dict[Situation, tuple[float, ...]] = field(
        default_factory=dict[Situation, tuple[float, ...]]
    )
    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class QState:
    """State of a request: the situation, the window chosen in it, and the agent."""

    latency: Latency
    situation: Situation
    learned: QTable


@dataclass(frozen=True, slots=True)
class QLearning(SoloController[QState]):
    """Learn the value of every window by trial, with reward tokens - price * seconds.

    The price is the running speed, so a window earns what it gives beyond the average; the
    acceptance rate as a reward would settle on short windows. What was learned is handed from a
    finished request to those that start after it. The situation is the share of the last window that
    was accepted (in quarters), that window, and the logarithm of the batch size.

    Args:
        windows: Windows to choose from.
        first_exploration: Chance of a random window in the first round; it falls as 1 / sqrt(1 +
            rounds / 64).
        last_exploration: Smallest chance of a random window.
        rate: Learning rate.
        discount: Weight of the next situation's value.

    Reference:
        Liu, Park and Shen, ACL 2025, paper 482, names a Q-learning agent; situation and reward are
        our design.
    """

    windows: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)
    first_exploration: float | int = 0.1
    last_exploration: float | int = 0.01
    rate: float | int = 0.1
    discount: float | int = 0.5

    reads = frozenset({Reads.ACCEPTED, Reads.LATENCY, Reads.MEMORY})

    def __post_init__(self) -> None:
        if not self.windows or min(self.windows) < 0 or len(set(self.windows)) < len(self.windows):
            raise OptionError(
                "q_learning: windows must be different numbers >= 0, at least one; "
                f"got {self.windows}"
            )
        check_bounds("q_learning", 0, 1, rate=self.rate, discount=self.discount)
        check_bounds("q_learning", 0, 1, first_exploration=self.first_exploration)
        check_bounds("q_learning", 0, 1, last_exploration=self.last_exploration)

    def init(self, shared: SharedState) -> QState:
        return QState(latency_of(shared, "q_learning"), (-1, 0, 0), shared.memory or QTable())

    def plan_one(
        self, state: QState, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        share = self.first_exploration / (1.0 + state.learned.rounds / 64) ** 0.5
        share = max(self.last_exploration, share)
        if share > 0.0 and draws.bernoulli(share):
            return DraftPlan(max_depth=self.windows[draw_index((1.0,) * len(self.windows), draws)])
        values = self._values(state.learned, state.situation)
        return DraftPlan(max_depth=self.windows[values.index(max(values))])

    def update(self, state: QState, record: StepRecord) -> QState:
        window, old = record.plan.max_depth or 0, state.learned
        # The end of the text may shorten a window, to a size between two choices.
        actions = [index for index, size in enumerate(self.windows) if size <= window]
        action = max(actions, default=0)
        quarter = -1 if record.depth == 0 else min(3, 4 * record.num_accepted // record.depth)
        following = (quarter, self.windows[action], record.batch_size.bit_length())
        new_tokens = record.num_accepted + 1
        new_seconds = state.latency.round_s(record.depth, record.batch_size)
        tokens = _RATE_MEMORY * old.tokens + new_tokens
        seconds = _RATE_MEMORY * old.seconds + new_seconds
        reward = new_tokens - tokens / seconds * new_seconds
        target = reward + self.discount * max(self._values(old, following))
        values = list(self._values(old, state.situation))
        values[action] += self.rate * (target - values[action])
        table = {**old.values, state.situation: tuple(values)}
        learned = QTable(table, tokens, seconds, old.rounds + 1)
        return QState(state.latency, following, learned)

    def learn(self, memory: QTable | None, state: QState, record: StepRecord) -> QTable:
        return state.learned

    def _values(self, learned: QTable, situation: Situation) -> tuple[float, ...]:
        return learned.values.get(situation, (0.0,) * len(self.windows))
