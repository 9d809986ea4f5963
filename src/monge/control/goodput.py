"""The default controller: the depth of most expected tokens per second, or plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from monge.control.acceptance import RecentCounts
from monge.control.base import Controller, Reads, RoundInfo, SharedState, latency_of
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord

_LOOK_UP: Final = 16
"""One round in so many asks the model-free drafters of a pool for full depth, even if none pays."""
_RECHECK: Final = 64
"""Where drafting leads by less than half, every round of such a number is plain, and so are those of a power of two.
The first plain rounds of a decoder are slow, and these later ones correct them."""
_LOST: Final = 0.04
"""Most that a probe may lose, as a share of the cooldown after it."""


@dataclass(frozen=True, slots=True)
class Known:
    """State of all requests of a decoder.

    Args:
        probe: Rounds left of a probe, in which drafting need not pay; below 0, rounds since.
        network: Acceptance of drafts that a network made, or the only drafter.
        model_free: Acceptance of drafts that the model-free drafters of a pool made.
        rounds: Finished rounds.
        cooldown: Rounds left in which the network does not draft.
        backoff: Rounds of the last cooldown; 0 while drafting pays.
        lost_s: Seconds by which rounds since the last cooldown took longer than plain ones for as many tokens.
    """

    probe: float
    network: RecentCounts = RecentCounts()
    model_free: RecentCounts = RecentCounts()
    rounds: float = 0.0
    cooldown: float = 0.0
    backoff: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected tokens of a request, and seconds, of a round."""

    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Goodput(Controller[SharedState]):
    """Draft to the depth of most expected tokens per second; decode plainly if none pays.

    Expected tokens follow from the acceptance by depth of the last rounds of all requests, shrunk
    to that of a longer past. Seconds are those of measured rounds. Requests that share a round share one depth,
    because all wait for the deepest draft. Model-free drafters of a pool draft first, as deep as
    raises tokens per second.

    If drafting does not beat plain decoding by `margin`, the network pauses for a cooldown. A probe
    of a few rounds ends it. Each probe that fails doubles the next cooldown. A cooldown also lasts until
    the seconds that its probe lost are at most 4 % of it.

    A batch must gain `batch_margin`: its requests end at different times, and a round for few of them
    costs nearly what a round for all does.

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

    reads = frozenset({Reads.ACCEPTED, Reads.LATENCY, Reads.NOTES})
    selects = True

    def __post_init__(self) -> None:
        sizes = {"max_window": self.max_window, "probe": self.probe}
        check_bounds("goodput", **sizes, last_cooldown=self.last_cooldown)
        check_bounds("goodput", 1, self.last_cooldown, first_cooldown=self.first_cooldown)
        check_bounds("goodput", 0, margin=self.margin, batch_margin=self.batch_margin)

    def init(self, shared: SharedState) -> SharedState:
        latency_of(shared, "goodput")
        return shared

    def drafts_at_once(self, shared: SharedState) -> bool:
        return self._known(shared).cooldown <= 0.0

    def plan(
        self, states: Sequence[SharedState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        shared, count, num_idle = states[0], len(states), info.batch_size - len(states)
        known = self._known(shared)

        def speed(forecast: Forecast) -> float:
            return (count * forecast.tokens + num_idle) / forecast.seconds

        if known.cooldown > 0.0 and not shared.model_free:
            return [DraftPlan(max_depth=0)] * count
        by_depth, best = self._network(shared, known, count, info.batch_size), 0
        # The first two rounds are plain, so that their seconds are known.
        if known.cooldown <= 0.0 and round(known.rounds) >= 2:
            speeds = list(map(speed, by_depth))
            best = 1 + _argmax(speeds[1:])
            if _is_recheck(round(known.rounds)) and speeds[best] < 1.5 * speeds[0]:
                no_lookup = 0 if shared.model_free else None
                return [DraftPlan(max_depth=0, model_free_depth=no_lookup)] * count
            if info.batch_size > 1 and known.probe <= 0.0:
                # Too few of these requests may draft. A drafter that pays for none pauses in `update`.
                best = best if speeds[best] >= (1.0 + self.batch_margin) * speeds[0] else 0
        lookups = self._model_free(shared, known, count, info.batch_size, by_depth[best])
        lookup_depth = _argmax(list(map(speed, lookups))) if lookups else None
        if lookups and int(known.rounds) % _LOOK_UP == 0:
            lookup_depth = len(lookups) - 1
        return [DraftPlan(max_depth=best, model_free_depth=lookup_depth)] * count

    def update(self, state: SharedState, record: StepRecord) -> SharedState:
        plan, known, share = record.plan, self._known(state), 1.0 / record.batch_size
        counts = len(record.examined), record.num_accepted
        is_model_free = record.depth > 0 and record.drafter in state.model_free
        if plan.model_free_depth:
            seen = counts if is_model_free else (0, 0)
            known = replace(known, model_free=known.model_free.update(*seen, share))
        is_asked = plan.max_depth != 0 and not is_model_free
        if is_asked:
            plain_s = latency_of(state, "goodput").round_s(0, record.batch_size)
            lost_s = record.times.total_s - len(record.token_ids) * plain_s
            known = replace(
                known,
                network=known.network.update(*counts, share),
                lost_s=max(0.0, known.lost_s + share * lost_s),
            )
        state.notes["goodput"] = self._paced(known, state, record.batch_size, is_asked=is_asked)
        return state

    def _known(self, shared: SharedState) -> Known:
        return shared.notes.get("goodput") or Known(probe=float(self.probe))

    def _paced(
        self, known: Known, shared: SharedState, batch_size: int, *, is_asked: bool
    ) -> Known:
        """Return the state with cooldown and probe moved on by one request's share of a round."""
        share, before = 1.0 / batch_size, known.rounds
        if known.cooldown > 0.0:
            left = max(0.0, known.cooldown - share)
            return replace(known, rounds=before + share, cooldown=left)
        known = replace(known, rounds=before + share, probe=known.probe - share * is_asked)
        # Once a round: forecasts for each of many requests would take longer than drafts.
        if known.probe > 0.0 or int(known.rounds + 0.5 * share) == int(before + 0.5 * share):
            return known
        forecasts = self._network(shared, known, batch_size, batch_size)
        plain, *drafted = (forecast.tokens / forecast.seconds for forecast in forecasts)
        best, is_alone = max(drafted), batch_size == 1
        margin, doubt = (self.margin, known.network.doubt) if is_alone else (self.batch_margin, 0.0)
        least = (1.0 + margin) * plain
        if best >= least and known.probe <= -self.first_cooldown:
            return replace(known, backoff=0)
        if (1.0 + doubt) * best >= least:
            return known
        backoff = min(max(2 * known.backoff, self.first_cooldown), self.last_cooldown)
        repaid = min(known.lost_s / (_LOST * forecasts[0].seconds), self.last_cooldown)
        cooldown = max(float(backoff), repaid)
        # What was seen before a cooldown says little about the drafts of the probe after it.
        network = known.network.aged(cooldown)
        return Known(
            probe=float(self.probe),
            network=network,
            model_free=known.model_free,
            rounds=known.rounds,
            cooldown=cooldown,
            backoff=backoff,
        )

    def _network(
        self, shared: SharedState, known: Known, count: int, batch_size: int
    ) -> list[Forecast]:
        """Return the forecasts by depth of the network's drafts, or of the only drafter's."""
        name = next((member.name for member in shared.members if member.runs_network), None)
        latency = latency_of(shared, "goodput").of(name, runs_network=True)
        deepest = max(1, min(self.max_window, shared.max_depth or self.max_window))
        seconds = latency.rounds_s(deepest, batch_size)
        return _forecasts(known.network, count, seconds, Forecast(1.0, seconds[0]))

    def _model_free(
        self, shared: SharedState, known: Known, count: int, batch_size: int, otherwise: Forecast
    ) -> list[Forecast]:
        """Return the forecasts by depth of model-free drafts; none without such drafters in a pool."""
        members = [member for member in shared.members if member.name in shared.model_free]
        deepest = min(self.max_window, max((member.max_depth for member in members), default=0))
        if not deepest:
            return []
        latency = latency_of(shared, "goodput").of(members[0].name, runs_network=False)
        seconds = latency.rounds_s(deepest, batch_size)
        return _forecasts(known.model_free, count, seconds, otherwise)


def _forecasts(
    counts: RecentCounts, num_requests: int, seconds: Sequence[float], otherwise: Forecast
) -> list[Forecast]:
    """Return the forecasts of rounds in which a drafter is asked for drafts of depth 0, 1, ...

    A request that the drafter finds nothing for takes part in the round that there would be
    otherwise, and waits for those that draft.

    Args:
        counts: Acceptance of the drafter.
        num_requests: Requests that it is asked for.
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


def _is_recheck(rounds: int) -> bool:
    """Return whether the next round is to measure plain decoding again.

    Args:
        rounds: Finished rounds.
    """
    number = rounds + 1
    return number % _RECHECK == 0 or number & (number - 1) == 0


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: values[place])
