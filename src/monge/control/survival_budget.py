"""One budget of drafted tokens for the whole batch, given to those that are most likely to be accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from monge.control.acceptance import REQUEST_KEEP, SHARED_KEEP, DepthCounts
from monge.control.base import (
    PLAIN,
    Controller,
    Reads,
    RoundInfo,
    SharedState,
    check_windows,
    latency_of,
)
from monge.control.budget import Speed, best_count, depths_of, first_stop
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError, unknown_name
from monge.core.verdict import StepRecord

_NAME = "survival_budget"
# Rounds by which the survivals that set a stale budget are older than those that are ranked.
_LAG = 2
_BARRIERS = ("stale", "first_stop")


@dataclass(frozen=True, slots=True)
class BudgetState:
    """State of one request.

    Args:
        shared: What the decoder's requests share.
        counts: Acceptance by depth in this request.
        survivals: Estimated survival by depth after each of the last rounds, the latest last.
        idle_rounds: Rounds since one that drafted.
    """

    shared: SharedState
    survivals: tuple[tuple[float, ...], ...]
    counts: DepthCounts = DepthCounts()
    idle_rounds: int = 0


@dataclass(frozen=True, slots=True)
class SurvivalBudget(Controller[BudgetState]):
    """Share one budget of drafted tokens over the batch, most probable tokens first.

    The slots (request, depth) of the whole batch are ranked by survival: the product of the
    request's acceptance by depth, from its finished rounds and those of others. A number of them is
    admitted for which expected tokens per second are largest, the seconds of a round being
    predicted as if its slots were spread evenly over the requests.

    * `stale`: that number is searched with the survivals of two rounds ago, then the best slots of
      now are admitted.
    * `first_stop`: slots of now are admitted until the first that does not raise tokens per second;
      too early where costs jump.

    A request's plan depends on its neighbours: every text keeps its law, but not its draws, so
    equal seeds do not give equal texts in a crowd.

    Args:
        barrier: `stale` or `first_stop`, see above.
        max_window: Deepest slot of a request; at most the tree builder's own depth has an effect.
        max_slots: Most slots of the batch; `None` for no limit but throughput.
        probe_rounds: Rounds without a draft after which a request drafts one token whatever the
            budget, to learn.

    Reference:
        DSpark, arXiv 2607.05147, algorithm 1 and appendix A.
    """

    barrier: str = "stale"
    max_window: int = 8
    max_slots: int | None = None
    probe_rounds: int = 32

    reads = frozenset({Reads.ACCEPTED, Reads.LATENCY, Reads.NOTES})

    def __post_init__(self) -> None:
        check_windows(_NAME, lowest=1, highest=self.max_window)
        if self.barrier not in _BARRIERS:
            raise unknown_name(f"{_NAME} barrier", self.barrier, _BARRIERS)
        if self.probe_rounds < 1 or (self.max_slots is not None and self.max_slots < 1):
            raise OptionError(
                f"{_NAME}: need probe_rounds >= 1 and max_slots >= 1 or None; got "
                f"{self.probe_rounds}, {self.max_slots}"
            )

    def init(self, shared: SharedState) -> BudgetState:
        latency_of(shared, _NAME)
        return BudgetState(shared, (self._survival(DepthCounts(), shared),))

    def plan(
        self, states: Sequence[BudgetState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        now, num_rows = [state.survivals[-1] for state in states], info.batch_size
        # Neighbours that do not draft have no slots, but wait for those who do, and write a token a
        # round.
        idle, speed = (
            [()] * (num_rows - len(states)),
            _speed(latency_of(states[0].shared, _NAME), len(states), info),
        )
        if self.barrier == "stale":
            count = best_count([*(state.survivals[0] for state in states), *idle], speed)
        else:
            count = first_stop([*now, *idle], speed)
        depths = depths_of(now, count if self.max_slots is None else min(count, self.max_slots))
        probes = [state.idle_rounds >= self.probe_rounds for state in states]
        return [
            DraftPlan(max_depth=max(depth, int(probe))) if depth or probe else PLAIN
            for depth, probe in zip(depths, probes, strict=True)
        ]

    def update(self, state: BudgetState, record: StepRecord) -> BudgetState:
        counts = state.counts
        if record.examined:
            shared_counts: DepthCounts = state.shared.notes.get(_NAME, DepthCounts())
            state.shared.notes[_NAME] = shared_counts.update(record, SHARED_KEEP)
            counts = counts.update(record, REQUEST_KEEP)
        return replace(
            state,
            survivals=(*state.survivals, self._survival(counts, state.shared))[-_LAG - 1 :],
            counts=counts,
            idle_rounds=0 if record.depth else state.idle_rounds + 1,
        )

    def _survival(self, counts: DepthCounts, shared: SharedState) -> tuple[float, ...]:
        shared_counts: DepthCounts = shared.notes.get(_NAME, DepthCounts())
        return tuple(
            accumulate(
                counts.acceptance(self.max_window, shared_counts.acceptance(self.max_window)), mul
            )
        )


def _speed(latency: Latency, num_drafting: int, info: RoundInfo) -> Speed:
    """Rounds per second of this batch by its tokens to verify.

    A fraction of a level costs that fraction.
    """
    at = info.batch_size, max(info.context_lengths)

    def speed(num_tokens: int) -> float:
        depth, beyond = divmod(num_tokens - info.batch_size, num_drafting)
        seconds = latency.round_s(depth, *at)
        if beyond:
            seconds += beyond / num_drafting * (latency.round_s(depth + 1, *at) - seconds)
        return 1.0 / seconds

    return speed
