"""The default controller: the depth of most expected tokens per second, or plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from monge.control.acceptance import RecentCounts, argmax
from monge.control.base import Controller, Reads, RoundInfo, SharedState, latency_of
from monge.control.latency import Latency
from monge.core.context import PLAIN, DraftPlan
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws

_LOOK_UP: Final = 16
"""In one round of this many, the model-free drafters of a pool draft to full depth, even if no depth pays."""
_RECHECK: Final = 64
"""If drafting is faster by less than half, every round whose number is a multiple of this or a
power of two is plain. The first plain rounds of a decoder are slow, and these later rounds correct
their times."""
_LOST: Final = 0.04
"""Most that drafts may lose between two cooldowns, as a share of the second."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """Counts and cooldowns that the rounds of all requests gave.

    Args:
        probe: Rounds left of a probe, in which drafting need not pay; below 0, rounds since.
        network: Acceptance of drafts that a network made, or the only drafter.
        model_free: Acceptance of drafts that the model-free drafters of a pool made.
        rounds: Finished rounds.
        cooldown: Rounds left in which the network does not draft.
        backoff: Rounds of the last cooldown; 0 while drafting pays.
        lost_s: Seconds by which rounds since the last cooldown took longer than plain rounds for as
            many tokens; below 0 where they took less.
    """

    probe: float
    network: RecentCounts = RecentCounts()
    model_free: RecentCounts = RecentCounts()
    rounds: float = 0.0
    cooldown: float = 0.0
    backoff: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """State of a request: the costs of its drafters, which never change.

    Args:
        network: Latency of rounds that a network drafts, or the only drafter.
        network_depth: Depth of its deepest draft.
        lookup: Latency of rounds that a model-free drafter of a pool drafts.
        lookup_depth: Depth of the deepest such draft; 0 where there is none.
        model_free: Names of the pool's drafters that run no network and come before a network.
    """

    network: Latency
    network_depth: int
    lookup: Latency
    lookup_depth: int
    model_free: frozenset[str]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected tokens of a request, and seconds, of a round."""

    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Goodput(Controller[DrafterCosts]):
    """Draft to the depth of most expected tokens per second; decode plainly if none pays.

    Expected tokens follow from the acceptance by depth of the last rounds of all requests, shrunk
    to that of a longer past. Seconds are those of measured rounds. Requests that share a round
    share its depth, because all wait for the deepest draft. Model-free drafters of a pool draft
    first, as deep as raises tokens per second.

    If drafting does not beat plain decoding by `margin`, the network pauses for a cooldown. A probe
    of a few rounds ends it. Each probe that fails doubles the next cooldown. A cooldown also lasts
    until the seconds that drafts lost since the cooldown before are at most 4 % of it. A batch must
    gain `batch_margin`: its requests end at different times, and a round for few costs nearly what
    a round for all does.

    Args:
        max_window: Largest depth; the tree builder's own depth is a limit too.
        margin: Share by which drafting must beat plain decoding.
        batch_margin: The same share, for several requests at once.
        probe: Rounds of a probe.
        first_cooldown: Rounds of the first cooldown.
        last_cooldown: Rounds of the longest cooldown.

    Reference:
        Own design; tokens per second over renewals as in Dinkelbach, 1967.
    """

    max_window: int = 8
    margin: float | int = 0.02
    batch_margin: float | int = 0.1
    probe: int = 2
    first_cooldown: int = 32
    last_cooldown: int = 1024

    reads = frozenset({Reads.ACCEPTED, Reads.LATENCY, Reads.MEMORY})
    selects = True

    def __post_init__(self) -> None:
        sizes = {"max_window": self.max_window, "probe": self.probe}
        check_bounds("goodput", **sizes, last_cooldown=self.last_cooldown)
        check_bounds("goodput", 1, self.last_cooldown, first_cooldown=self.first_cooldown)
        check_bounds("goodput", 0, margin=self.margin, batch_margin=self.batch_margin)

    def init(self, shared: SharedState) -> DrafterCosts:
        latency, members = latency_of(shared, "goodput"), shared.members
        network = next((member.name for member in members if member.runs_network), None)
        lookups = list(takewhile(lambda member: not member.runs_network, members))
        lookups = [] if network is None else lookups
        deepest_lookup = max((member.max_depth for member in lookups), default=0)
        return DrafterCosts(
            latency.of(network, runs_network=True),
            max(1, min(self.max_window, shared.max_depth or self.max_window)),
            latency.of(lookups[0].name if lookups else None, runs_network=False),
            min(self.max_window, deepest_lookup),
            frozenset(member.name for member in lookups),
        )

    def prefills_drafter_eagerly(self, shared: SharedState) -> bool:
        return (shared.memory or self._first).cooldown <= 0.0

    def plan(
        self, states: Sequence[DrafterCosts], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        costs, count, num_idle = states[0], len(states), info.batch_size - len(states)
        memory: Lessons = info.memory or self._first

        def speed(forecast: Forecast) -> float:
            return (count * forecast.tokens + num_idle) / forecast.seconds

        if memory.cooldown > 0.0 and not costs.model_free:
            return [PLAIN] * count
        by_depth, best = _network_forecasts(memory, costs, count, info.batch_size), 0
        # The first two rounds are plain, so that their seconds are measured.
        if memory.cooldown <= 0.0 and round(memory.rounds) >= 2:
            speeds, number = list(map(speed, by_depth)), round(memory.rounds) + 1
            best = 1 + argmax(speeds[1:])
            is_recheck = number % _RECHECK == 0 or number & (number - 1) == 0
            if is_recheck and speeds[best] < 1.5 * speeds[0]:
                no_lookup = 0 if costs.model_free else None
                return [DraftPlan(max_depth=0, model_free_depth=no_lookup)] * count
            if info.batch_size > 1 and memory.probe <= 0.0:
                # Too few requests may draft. A drafter that pays for none pauses in `learn`.
                best = best if speeds[best] >= (1.0 + self.batch_margin) * speeds[0] else 0
        lookup_depth = None
        if costs.lookup_depth:
            seconds = costs.lookup.rounds_s(costs.lookup_depth, info.batch_size)
            lookups = _forecasts(memory.model_free, count, seconds, by_depth[best])
            is_due = int(memory.rounds) % _LOOK_UP == 0
            lookup_depth = costs.lookup_depth if is_due else argmax(list(map(speed, lookups)))
        return [DraftPlan(max_depth=best, model_free_depth=lookup_depth)] * count

    def update(self, state: DrafterCosts, record: StepRecord) -> DrafterCosts:
        return state

    def learn(self, memory: Lessons | None, state: DrafterCosts, record: StepRecord) -> Lessons:
        plan, memory, share = record.plan, memory or self._first, 1.0 / record.batch_size
        counts = len(record.examined), record.num_accepted
        is_model_free = record.depth > 0 and record.drafter in state.model_free
        if plan.model_free_depth:
            seen = counts if is_model_free else (0, 0)
            memory = replace(memory, model_free=memory.model_free.update(*seen, share))
        is_asked = plan.max_depth != 0 and not is_model_free
        if is_asked:
            usual_s = state.network.usual_s
            plain_s = usual_s(0, record.batch_size)
            spent_s = usual_s(record.depth, record.batch_size)
            if memory.probe == self.probe:
                # The first draft after a pause may read the whole text. Other slow rounds are the machine's.
                spent_s = max(spent_s, record.times.total_s)
            lost_s = spent_s - len(record.token_ids) * plain_s
            memory = replace(
                memory,
                network=memory.network.update(*counts, share),
                lost_s=memory.lost_s + share * lost_s,
            )
        return self._paced(memory, state, record.batch_size, is_asked=is_asked)

    @property
    def _first(self) -> Lessons:
        return Lessons(probe=float(self.probe))

    def _paced(
        self, memory: Lessons, costs: DrafterCosts, batch_size: int, *, is_asked: bool
    ) -> Lessons:
        """Return the state with cooldown and probe moved on by a request's share of a round."""
        share, before = 1.0 / batch_size, memory.rounds
        if memory.cooldown > 0.0:
            left = max(0.0, memory.cooldown - share)
            return replace(memory, rounds=before + share, cooldown=left)
        memory = replace(memory, rounds=before + share, probe=memory.probe - share * is_asked)
        # Once a round: forecasts for each of many requests would take longer than drafts.
        if memory.probe > 0.0 or int(memory.rounds + 0.5 * share) == int(before + 0.5 * share):
            return memory
        forecasts = _network_forecasts(memory, costs, batch_size, batch_size)
        plain, *drafted = (forecast.tokens / forecast.seconds for forecast in forecasts)
        best, is_alone = max(drafted), batch_size == 1
        margin = self.margin if is_alone else self.batch_margin
        doubt = memory.network.doubt if is_alone else 0.0
        least = (1.0 + margin) * plain
        if best >= least and memory.probe <= -self.first_cooldown:
            return replace(memory, backoff=0)
        if (1.0 + doubt) * best >= least:
            return memory
        backoff = min(max(2 * memory.backoff, self.first_cooldown), self.last_cooldown)
        # What rounds since the last cooldown gained, if anything, pays for those that lost.
        repaid = min(memory.lost_s / (_LOST * forecasts[0].seconds), self.last_cooldown)
        cooldown = max(float(backoff), repaid)
        # What was seen before a cooldown says little about the drafts of the probe after it.
        network = memory.network.aged(cooldown)
        probe, rounds = float(self.probe), memory.rounds
        return Lessons(probe, network, memory.model_free, rounds, cooldown, backoff)


def _network_forecasts(
    memory: Lessons, costs: DrafterCosts, num_requests: int, batch_size: int
) -> list[Forecast]:
    """Return the forecasts by depth of the network's drafts, or of the only drafter's."""
    seconds = costs.network.rounds_s(costs.network_depth, batch_size)
    return _forecasts(memory.network, num_requests, seconds, Forecast(1.0, seconds[0]))


def _forecasts(
    counts: RecentCounts, num_requests: int, seconds: Sequence[float], otherwise: Forecast
) -> list[Forecast]:
    """Return the forecasts of rounds in which a drafter drafts to depth 0, 1, ...

    A request that the drafter finds nothing for takes part in the round that there would be
    otherwise, and waits for those that draft.

    Args:
        counts: Acceptance of the drafter.
        num_requests: Requests for which it drafts.
        seconds: Seconds of a round by depth.
        otherwise: The round without this drafter; depth 0.
    """
    rate = counts.hit_rate
    any_hit = min(1.0, num_requests * rate)  # as if no two requests drafted in the same round
    least = otherwise.seconds if num_requests > 1 else 0.0
    tokens = [
        rate * drafted + (1.0 - rate) * otherwise.tokens
        for drafted in counts.tokens(len(seconds) - 1)
    ]
    spent = [
        any_hit * max(duration, least) + (1.0 - any_hit) * otherwise.seconds for duration in seconds
    ]
    return [otherwise, *map(Forecast, tokens[1:], spent[1:])]
