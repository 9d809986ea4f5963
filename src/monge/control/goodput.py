"""The default controller: the depth of most expected tokens per second, or plain decoding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from monge.control.acceptance import DepthCounts, expected_tokens
from monge.control.base import (
    Controller,
    Reads,
    RoundInfo,
    SharedState,
    check_windows,
    latency_of,
)
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.verdict import StepRecord

_RECENT_KEEP: Final = 0.9
"""Factor on the weight of a round with each later one, in the recent acceptance."""
_LONG_KEEP: Final = 0.99
"""The same factor, in the acceptance that recent acceptance is shrunk to."""
_DOUBT: Final = 0.25
"""Half a standard error of the expected speed after one round, as a share of it: the tokens of a
round deviate by about half their mean. Drafting pauses only if it does not pay even so much faster."""
_EXPLORE: Final = 64
"""One round in so many drafts to its full depth, so that deep levels stay known."""


@dataclass(frozen=True, slots=True)
class Shared:
    """State of all requests of a decoder.

    Args:
        network: Acceptance of drafts that a network made, or the only drafter.
        recent: The same, of the last rounds.
        model_free: Acceptance of drafts that the model-free drafters of a pool made.
        rounds: Finished rounds.
        cooldown: Rounds left in which the network does not draft.
        backoff: Rounds of the last cooldown; 0 while drafting pays.
        probe: Rounds left of a probe, in which drafting need not pay; below 0, rounds since.
    """

    network: DepthCounts = DepthCounts()
    recent: DepthCounts = DepthCounts()
    model_free: DepthCounts = DepthCounts()
    rounds: float = 0.0
    cooldown: float = 0.0
    backoff: int = 0
    probe: float = 0.0


@dataclass(frozen=True, slots=True)
class GoodputState:
    """State of one request.

    Args:
        shared: State of the decoder.
        network: This request's acceptance of drafts that a network made, or the only drafter.
        model_free: The same of the model-free drafters of a pool.
    """

    shared: SharedState
    network: DepthCounts = DepthCounts()
    model_free: DepthCounts = DepthCounts()


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected tokens and seconds of a round.

    Args:
        tokens: Tokens of each request.
        seconds: Seconds of the round.
    """

    tokens: tuple[float, ...]
    seconds: float

    def goodput(self, num_idle: int = 0) -> float:
        """Return tokens per second of the batch, of which `num_idle` other requests decode plainly."""
        return (sum(self.tokens) + num_idle) / self.seconds


@dataclass(frozen=True, slots=True)
class Goodput(Controller[GoodputState]):
    """Draft to the depth of most expected tokens per second; decode plainly if none pays.

    Expected tokens follow from the acceptance by depth of a request, shrunk to that of all
    requests. Seconds are those of measured rounds. Requests that share a round share one depth,
    because all wait for the deepest draft. Model-free drafters of a pool draft first, as deep as
    raises tokens per second.

    If drafting does not beat plain decoding by `margin`, the network pauses for a cooldown. A probe
    of a few rounds ends it; each probe that fails doubles the next cooldown.

    Args:
        max_window: Largest depth; the tree builder's own depth is a limit too.
        margin: Share by which drafting must beat plain decoding.
        probe: Rounds of a probe.
        first_cooldown: Rounds of the first cooldown.
        last_cooldown: Rounds of the longest cooldown.

    Reference:
        Own design; tokens per second over renewals as in Dinkelbach, 1967.
    """

    max_window: int = 8
    margin: float | int = 0.02
    probe: int = 2
    first_cooldown: int = 8
    last_cooldown: int = 1024

    reads = frozenset({Reads.ACCEPTED, Reads.LATENCY, Reads.NOTES})
    selects = True

    def __post_init__(self) -> None:
        check_windows("goodput", lowest=1, highest=self.max_window)
        if (
            not 1 <= self.first_cooldown <= self.last_cooldown
            or self.probe < 1
            or not self.margin >= 0.0
        ):
            raise OptionError(
                "goodput: need 1 <= first_cooldown <= last_cooldown, probe >= 1 and margin >= 0; "
                f"got {self.first_cooldown}, {self.last_cooldown}, {self.probe}, {self.margin}"
            )

    def init(self, shared: SharedState) -> GoodputState:
        latency_of(shared, "goodput")
        return GoodputState(shared)

    def drafts_at_once(self, shared: SharedState) -> bool:
        return self._shared(shared).cooldown <= 0.0

    def plan(
        self, states: Sequence[GoodputState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        shared, latency = states[0].shared, latency_of(states[0].shared, "goodput")
        known, num_idle = self._shared(shared), info.batch_size - len(states)
        number = int(known.rounds)
        drafted, depth = self._network(states, known, latency, info.batch_size), 0
        # The first round is plain, so that its seconds are known.
        if known.cooldown <= 0.0 and number > 0:
            speeds = [one.goodput(num_idle) for one in drafted]
            depth = 1 + _argmax(speeds[1:])
            if number % _EXPLORE == 0:
                depth = len(drafted) - 1
            elif info.batch_size > 1 and known.probe <= 0.0:
                # Too few of these requests may draft. A drafter that pays for none pauses in `update`.
                pays = (1.0 + _doubt(known.recent)) * speeds[depth] >= speeds[0]
                depth = depth if pays else 0
        model_free = self._model_free_depth(states, known, latency, info, drafted[depth])
        return [DraftPlan(max_depth=depth, model_free_depth=model_free)] * len(states)

    def update(self, state: GoodputState, record: StepRecord) -> GoodputState:
        shared, plan = state.shared, record.plan
        known, num_examined = self._shared(shared), len(record.examined)
        is_model_free = record.depth > 0 and record.drafter in shared.model_free
        keep = _RECENT_KEEP ** (1.0 / record.batch_size)
        if plan.model_free_depth:
            found = (num_examined, record.num_accepted) if is_model_free else (0, 0)
            known = replace(known, model_free=known.model_free.update(*found, _LONG_KEEP))
            state = replace(state, model_free=state.model_free.update(*found, _RECENT_KEEP))
        if plan.max_depth != 0 and not is_model_free:
            found = num_examined, record.num_accepted
            known = replace(
                known,
                network=known.network.update(*found, _LONG_KEEP),
                recent=known.recent.update(*found, keep),
            )
            state = replace(state, network=state.network.update(*found, _RECENT_KEEP))
        elif known.cooldown > 0.0:
            # What was seen before a cooldown says little about the drafts of the probe after it.
            known = replace(known, recent=known.recent.aged(keep))
            state = replace(state, network=state.network.aged(_RECENT_KEEP))
        is_draft = record.depth > 0 and not is_model_free
        shared.notes["goodput"] = self._paced(known, shared, record.batch_size, is_draft=is_draft)
        return state

    def _paced(
        self, known: Shared, shared: SharedState, batch_size: int, *, is_draft: bool
    ) -> Shared:
        """Return the state with cooldown and probe moved on by one request's share of a round."""
        share = 1.0 / batch_size
        known = replace(known, rounds=known.rounds + share)
        if known.rounds <= share or 0.0 < known.cooldown <= share:
            return replace(known, cooldown=0.0, probe=float(self.probe))
        if known.cooldown > 0.0:
            return replace(known, cooldown=known.cooldown - share)
        if not is_draft:
            return known
        known = replace(known, probe=known.probe - share)
        return known if known.probe > 0.0 else self._judged(known, shared, batch_size)

    def _judged(self, known: Shared, shared: SharedState, batch_size: int) -> Shared:
        """Return the state with a cooldown if drafting has not paid."""
        latency = latency_of(shared, "goodput")
        drafted = self._network(
            [GoodputState(shared)], known, latency, batch_size, copies=batch_size
        )
        plain, *others = [one.goodput() for one in drafted]
        least, best = (1.0 + self.margin) * plain, max(others)
        if best >= least and known.probe <= -self.first_cooldown:
            return replace(known, backoff=0)
        if (1.0 + _doubt(known.recent)) * best >= least:
            return known
        backoff = min(max(2 * known.backoff, self.first_cooldown), self.last_cooldown)
        return replace(known, cooldown=float(backoff), backoff=backoff)

    def _network(
        self,
        states: Sequence[GoodputState],
        known: Shared,
        latency: Latency,
        batch_size: int,
        *,
        copies: int = 1,
    ) -> list[Forecast]:
        """Return the forecasts of rounds by depth of the network's drafts, or of the only drafter's."""
        shared = states[0].shared
        name = next((one.name for one in shared.members if one.runs_network), None)
        view = latency.of(name, runs_network=True)
        deepest = max(1, min(self.max_window, shared.max_depth or self.max_window))
        usual = known.recent.acceptance(deepest, known.network.acceptance(deepest))
        return _forecasts(
            [state.network for state in states],
            usual,
            known.network.hit_rate(),
            view.rounds_s(deepest, batch_size),
            Forecast((1.0,) * len(states), view.round_s(0, batch_size)),
            copies=copies,
        )

    def _model_free_depth(
        self,
        states: Sequence[GoodputState],
        known: Shared,
        latency: Latency,
        info: RoundInfo,
        otherwise: Forecast,
    ) -> int | None:
        """Return the depth of model-free drafts; `None` without such drafters in a pool."""
        shared = states[0].shared
        members = [one for one in shared.members if one.name in shared.model_free]
        deepest = min(self.max_window, max((one.max_depth for one in members), default=0))
        if not deepest:
            return None
        view = latency.of(members[0].name, runs_network=False)
        drafted = _forecasts(
            [state.model_free for state in states],
            known.model_free.acceptance(deepest),
            known.model_free.hit_rate(),
            view.rounds_s(deepest, info.batch_size),
            otherwise,
        )
        num_idle = info.batch_size - len(states)
        depth = _argmax([one.goodput(num_idle) for one in drafted])
        return deepest if int(known.rounds) % (_EXPLORE // 4) == 0 else depth

    @staticmethod
    def _shared(shared: SharedState) -> Shared:
        return shared.notes.get("goodput", Shared())


def _forecasts(
    requests: Sequence[DepthCounts],
    usual: Sequence[float],
    usual_rate: float,
    seconds: Sequence[float],
    otherwise: Forecast,
    *,
    copies: int = 1,
) -> list[Forecast]:
    """Return the forecasts of rounds in which a drafter is asked for drafts of depth 0, 1, ...

    A request that the drafter finds nothing for takes part in the round that there would be
    otherwise, and waits for those that draft.

    Args:
        requests: What is known of each request.
        usual: Acceptance by depth of all requests.
        usual_rate: Share of the rounds in which a request drafts.
        seconds: Seconds of a round by depth.
        otherwise: The round without this drafter; depth 0.
        copies: Requests of the batch that each of these stands for.
    """
    deepest = len(seconds) - 1
    tokens = [expected_tokens(own.acceptance(deepest, usual)) for own in requests]
    rates = [own.hit_rate(usual_rate) for own in requests]
    any_hit = 1.0 - math.prod(1.0 - rate for rate in rates) ** copies
    is_shared = len(requests) * copies > 1
    forecasts = [otherwise]
    for depth in range(1, deepest + 1):
        spent = max(seconds[depth], otherwise.seconds) if is_shared else seconds[depth]
        forecasts.append(
            Forecast(
                tuple(
                    rate * own[depth] + (1.0 - rate) * without
                    for rate, own, without in zip(rates, tokens, otherwise.tokens, strict=True)
                ),
                any_hit * spent + (1.0 - any_hit) * otherwise.seconds,
            )
        )
    return forecasts


def _doubt(counts: DepthCounts) -> float:
    return _DOUBT / math.sqrt(counts.asked + 1.0)


def _argmax(values: Sequence[float]) -> int:
    best: Callable[[int], float] = values.__getitem__
    return max(range(len(values)), key=best)
