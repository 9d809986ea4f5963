"""The default controller: the depth of most expected tokens per second, or plain decoding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from monge.control.acceptance import DepthCounts, expected_tokens
from monge.control.base import Controller, Reads, RoundInfo, SharedState, check_windows, latency_of
from monge.control.calibration import Calibration
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.stopping import StopRule
from monge.core.verdict import StepRecord

_FIRST_WEIGHT: Final = 4.0  # rounds that the first guess of acceptance counts for
# Weight that a round keeps with every later one, in a request's acceptance of a network's drafts,
# and rounds that the acceptance of all requests counts for in it: texts differ little, and the
# acceptance of one hardly changes.
_REQUEST_KEEP: Final = 0.97
_OTHERS_WEIGHT: Final = 16.0
_MODEL_FREE_KEEP: Final = 0.9  # the same of drafts without a network: copied passages come in runs
_SHARED_KEEP: Final = 0.99  # the same in the acceptance of all requests
_SPEED_KEEP: Final = 0.98  # the same in the running speed
# One round in so many drafts to its full depth, so that deep levels stay known.
_UNSTOPPED: Final = 64
_PROBE_SHARE: Final = 0.005  # share of the time that probes may take while drafting does not pay
# The longest cooldown over the first, where a probe is slow: the network reads much missed text.
_GROWTH: Final = 10
_LONGEST_PROBE: Final = 16
# Half a standard error of the expected speed after one round, as a share of it: the tokens of a
# round have a standard deviation of about half their mean. Only worse speed pauses drafting.
_DOUBT: Final = 0.25
_SETTLED: Final = 8  # rounds after which drafting that pays again forgets earlier cooldowns
_RETRY: Final = 16  # one round in so many asks model-free drafters that do not pay


@dataclass(frozen=True, slots=True)
class Offers:
    """How often a request drafts that is asked to: a lookup finds no match in most rounds.

    Args:
        drafted: Rounds in which it drafted, recent ones weighing most.
        asked: Rounds in which it was asked, likewise.
    """

    drafted: float = 0.0
    asked: float = 0.0

    def seen(self, has_drafted: bool, keep: float) -> "Offers":
        """With one more round; earlier ones count `keep` times as much as before."""
        return Offers(keep * self.drafted + has_drafted, keep * self.asked + 1.0)

    def share(self, usual: float = 1.0) -> float:
        """The share of rounds; `usual` counts as one more round."""
        return (self.drafted + usual) / (self.asked + 1.0)


@dataclass(frozen=True, slots=True)
class Pacing:
    """When the network is asked to draft.

    Args:
        cooldown: Rounds left before the network is probed.
        backoff: Rounds of the last cooldown; 0 while drafting pays.
        probing: Rounds left of the present probe; `None` before the first round.
        next_probe: Rounds of the probe that ends the cooldown.
        num_drafted: Rounds planned to draft since the last cooldown.
        num_planned: All rounds planned.
    """

    cooldown: int = 0
    backoff: int = 0
    probing: int | None = None
    next_probe: int = 0
    num_drafted: int = 0
    num_planned: int = 0


@dataclass(slots=True)
class SharedEstimates:
    """Estimates that all requests of a decoder share.

    Args:
        network: Acceptance by depth of drafts that a network made.
        model_free: Acceptance by depth of drafts that no network made.
        offers: How often requests draft that are asked to.
        model_free_offers: The same of model-free drafters of a pool.
        calibration: From the draft network's confidence to acceptance.
        tokens: Tokens of rounds in which a network drafted, recent rounds weighing most.
        seconds: Predicted seconds of these rounds.
        pacing: When the network is asked to draft, after all finished rounds.
        following: The same after the round that was planned last. It takes effect when a request of
            that round is updated, so a round that fails may be planned again. No plan reads it.
    """

    network: DepthCounts = DepthCounts()
    model_free: DepthCounts = DepthCounts()
    offers: Offers = Offers()
    model_free_offers: Offers = Offers()
    calibration: Calibration = field(default_factory=Calibration)
    tokens: float = 0.0
    seconds: float = 0.0
    pacing: Pacing = Pacing()
    following: Pacing | None = field(default=None, compare=False)

    @property
    def speed(self) -> float:
        """Tokens per second of one request while a network drafts.

        0 before the first such round.
        """
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class GoodputState:
    """State of one request.

    Args:
        shared: What the decoder's requests share.
        network: This request's acceptance of drafts that a network made.
        model_free: The same of drafts that no network made.
        offers: How often it drafts if it is asked to.
        model_free_offers: The same of model-free drafters of a pool.
    """

    shared: SharedState
    network: DepthCounts = DepthCounts()
    model_free: DepthCounts = DepthCounts()
    offers: Offers = Offers()
    model_free_offers: Offers = Offers()


@dataclass(frozen=True, slots=True)
class RoundForecast:
    """Expected tokens and seconds of a round, by depth from 0 on.

    Args:
        acceptance: Acceptance of each request's levels, from depth 1 on.
        tokens: Tokens of each request.
        batch_tokens: Tokens of the batch if all planned requests draft to this depth; gains of those
            that draft often weigh most.
        verify_s: Seconds without drafting.
        seconds: Seconds of the round.
    """

    acceptance: Sequence[tuple[float, ...]]
    tokens: Sequence[Sequence[float]]
    batch_tokens: Sequence[float]
    verify_s: Sequence[float]
    seconds: Sequence[float]

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding."""
        return self.batch_tokens[0] / self.seconds[0]

    @property
    def draft_speed(self) -> float:
        """Largest expected tokens per second of a round that drafts."""
        return max(
            gained / spent
            for gained, spent in zip(self.batch_tokens[1:], self.seconds[1:], strict=True)
        )

    def best_depth(self, price: float) -> int:
        """The depth, at least 1, of largest tokens - price * seconds."""
        return max(
            range(1, len(self.seconds)),
            key=lambda depth: self.batch_tokens[depth] - price * self.seconds[depth],
        )

    def loss_s(self, depth: int) -> float:
        """Return the seconds that a round of this depth loses against plain decoding."""
        return max(0.0, self.seconds[depth] - self.batch_tokens[depth] / self.plain_speed)


@dataclass(frozen=True, slots=True)
class Goodput(Controller[GoodputState]):
    """Draft while expected tokens per second grow; decode plainly if drafting does not pay.

    Tokens per second are largest where tokens - price * seconds is, with the attainable speed as
    the price. So a level is drafted if its chance of being accepted is at least the price of its
    seconds. The chance comes from the acceptance by depth of this request, shrunk to that of all
    requests, and from the draft network's confidence if it has one. Requests that share a round
    share one depth, because all wait for the deepest draft. Model-free drafters of a pool draft
    first if their candidates are worth more.

    If the expected speed does not exceed that of plain decoding by `margin`, not even with half a
    standard error added, the network pauses for a cooldown. A probe of a few rounds ends it; each
    probe that fails doubles the next cooldown, until probes take half a percent of the time.

    Args:
        max_window: Largest depth; the tree builder's own depth is a limit too.
        margin: Share by which drafting must beat plain decoding.
        probe: Fewest rounds of a probe.
        first_cooldown: Rounds of the first cooldown.
        last_cooldown: Rounds of the longest cooldown.

    Reference:
        Renewal-reward argument of Dinkelbach, 1967; own design.
    """

    max_window: int = 8
    margin: float | int = 0.02
    probe: int = 2
    first_cooldown: int = 8
    last_cooldown: int = 1024

    reads = frozenset(Reads)
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
                "got "
                f"{self.first_cooldown}, {self.last_cooldown}, {self.probe}, {self.margin}"
            )

    def init(self, shared: SharedState) -> GoodputState:
        latency_of(shared, "goodput")
        _learned(shared)
        return GoodputState(shared)

    def drafts_at_once(self, shared: SharedState) -> bool:
        return _learned(shared).pacing.cooldown == 0

    def plan(
        self, states: Sequence[GoodputState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        shared = states[0].shared
        learned, latency = _learned(shared), latency_of(shared, "goodput")
        at = info.batch_size, max(info.context_lengths)
        pacing = replace(learned.pacing, num_planned=learned.pacing.num_planned + 1)
        if pacing.cooldown > 0:
            learned.following = replace(
                pacing, cooldown=pacing.cooldown - 1, probing=pacing.next_probe, num_drafted=0
            )
            return self._plain(states, learned, latency, at)
        forecast = self._forecast(states, at, learned, latency)
        price = max(info.batch_size * learned.speed, forecast.plain_speed)
        depth, own_price = forecast.best_depth(price), price / info.batch_size
        reached = learned.network.reached[0] if learned.network.reached else 0.0
        pacing = self._paced(pacing, forecast, reached, latency.catch_up_s, forecast.loss_s(depth))
        learned.following = pacing
        if pacing.cooldown > 0:
            return self._plain(states, learned, latency, at)
        worths = [own[depth] - own_price * forecast.seconds[depth] for own in forecast.tokens]
        model_free_depths = self._model_free_depths(
            states, learned, latency, at, worths=worths, price=own_price
        )
        is_whole = pacing.num_drafted % _UNSTOPPED == 0
        plans: list[DraftPlan] = []
        for acceptance, model_free_depth in zip(
            forecast.acceptance, model_free_depths, strict=True
        ):
            window, stop = self._limits(
                learned.calibration, forecast, depth, acceptance, own_price, is_whole=is_whole
            )
            plans.append(
                DraftPlan(
                    max_depth=window, stop=stop, model_free_depth=model_free_depth, price=price
                )
            )
        return plans

    def update(self, state: GoodputState, record: StepRecord) -> GoodputState:
        learned, plan = _learned(state.shared), record.plan
        if learned.following is not None:  # the first request of the round
            learned.pacing, learned.following = learned.following, None
        is_model_free = record.depth > 0 and record.drafter in state.shared.model_free
        if plan.model_free_depth:
            learned.model_free_offers = learned.model_free_offers.seen(is_model_free, _SHARED_KEEP)
            offers = state.model_free_offers.seen(is_model_free, _MODEL_FREE_KEEP)
            state = replace(state, model_free_offers=offers)
        if plan.max_depth != 0 and not is_model_free:
            learned.offers = learned.offers.seen(record.depth > 0, _SHARED_KEEP)
            state = replace(state, offers=state.offers.seen(record.depth > 0, _MODEL_FREE_KEEP))
        if record.depth == 0:
            # Old acceptance of a request is worth less than recent acceptance of others.
            return (
                replace(state, network=state.network.aged(_SHARED_KEEP))
                if state.network.reached
                else state
            )
        seen = [(len(record.examined), record.num_accepted)]
        if is_model_free:
            learned.model_free = learned.model_free.seen(seen, _SHARED_KEEP)
            return replace(state, model_free=state.model_free.seen(seen, _MODEL_FREE_KEEP))
        learned.network = learned.network.seen(seen, _SHARED_KEEP)
        learned.calibration = learned.calibration.update(
            record.confidences, record.num_accepted, len(record.examined)
        )
        # Predicted seconds, so that one slow moment of the machine does not change the price.
        latency = latency_of(state.shared, "goodput")
        seconds = latency.verify_s(record.num_nodes, record.batch_size, record.context_length)
        seconds += latency.draft_s(max(record.depth, record.levels_read), record.batch_size)
        learned.tokens = _SPEED_KEEP * learned.tokens + record.num_accepted + 1
        learned.seconds = _SPEED_KEEP * learned.seconds + seconds
        return replace(state, network=state.network.seen(seen, _REQUEST_KEEP))

    def _plain(
        self,
        states: Sequence[GoodputState],
        learned: SharedEstimates,
        latency: Latency,
        at: tuple[int, int],
    ) -> list[DraftPlan]:
        """Return plans without the network; model-free drafters may draft."""
        batch_size, plain_s = at[0], latency.verify_s(0, *at)
        own_price = max(learned.speed, 1.0 / plain_s)
        worths = [1.0 - own_price * plain_s] * len(states)
        depths = self._model_free_depths(
            states, learned, latency, at, worths=worths, price=own_price
        )
        return [
            DraftPlan(max_depth=0, model_free_depth=depth, price=batch_size * own_price)
            for depth in depths
        ]

    def _forecast(
        self,
        states: Sequence[GoodputState],
        at: tuple[int, int],
        learned: SharedEstimates,
        latency: Latency,
    ) -> RoundForecast:
        deepest, batch_size = latency.within(self.max_window), at[0]
        usual = learned.network.acceptance(deepest, weight=_FIRST_WEIGHT)
        acceptance = [
            state.network.acceptance(deepest, usual, weight=_OTHERS_WEIGHT) for state in states
        ]
        tokens = [expected_tokens(own) for own in acceptance]
        shares = [state.offers.share(learned.offers.share()) for state in states]
        usual_share = sum(shares) / len(shares)
        verify_s = _charged(
            [latency.verify_s(latency.num_nodes(depth), *at) for depth in range(deepest + 1)],
            shares,
        )
        return RoundForecast(
            acceptance=acceptance,
            tokens=tokens,
            batch_tokens=[
                batch_size
                + sum(
                    share / usual_share * (own[depth] - 1.0)
                    for share, own in zip(shares, tokens, strict=True)
                )
                for depth in range(deepest + 1)
            ],
            verify_s=verify_s,
            seconds=[
                spent + latency.draft_s(depth, batch_size) for depth, spent in enumerate(verify_s)
            ],
        )

    def _paced(
        self,
        pacing: Pacing,
        forecast: RoundForecast,
        reached: float,
        catch_up_s: float,
        loss_s: float,
    ) -> Pacing:
        """Return the pacing after the coming round; the network drafts in it unless that is a cooldown.

        Args:
            pacing: Before it.
            forecast: Of the round.
            reached: Weight of the rounds from which acceptance is known.
            catch_up_s: Seconds in which the network reads the text that it missed.
            loss_s: Seconds that the round loses against plain decoding.
        """
        # Nothing is known before the first round.
        probing = self.probe if pacing.probing is None else pacing.probing
        backoff = pacing.backoff
        hope = 1.0 + _DOUBT / math.sqrt(reached + _FIRST_WEIGHT)
        if probing > 0:
            probing -= 1
        elif hope * forecast.draft_speed < (1.0 + self.margin) * forecast.plain_speed:
            # A probe is as long as its rounds lose less than reading the missed text does.
            probe = max(
                self.probe,
                min(_LONGEST_PROBE, int(catch_up_s / loss_s) if loss_s else _LONGEST_PROBE),
            )
            lost_s = catch_up_s + probe * loss_s
            longest = min(
                self.last_cooldown, math.ceil(lost_s / (_PROBE_SHARE * forecast.seconds[0]))
            )
            backoff = max(self.first_cooldown, longest // _GROWTH, min(2 * backoff, longest))
            return replace(
                pacing, probing=probing, backoff=backoff, cooldown=backoff, next_probe=probe
            )
        elif pacing.num_drafted >= _SETTLED:
            backoff = 0
        return replace(pacing, probing=probing, backoff=backoff, num_drafted=pacing.num_drafted + 1)

    def _limits(
        self,
        calibration: Calibration,
        forecast: RoundForecast,
        depth: int,
        acceptance: tuple[float, ...],
        price: float,
        *,
        is_whole: bool,
    ) -> tuple[int, StopRule]:
        """Return the largest depth of a draft, and its stop rule; a whole draft is not stopped."""
        deepest = len(acceptance)
        if calibration.num_rounds == 0 or is_whole:
            # A price of 0 stops nothing and asks for the network's confidence. A network without
            # one drafts to `depth`.
            return (depth if calibration.num_rounds == 0 else deepest), StopRule(draw_prices=(0.0,))
        return deepest, StopRule(
            bias=calibration.bias,
            slope=calibration.slope,
            temperatures=calibration.temperatures,
            draw_prices=_marginal(price, forecast.verify_s),
            read_prices=_marginal(price, forecast.seconds),
            expected=acceptance,
            following=calibration.following,
        )

    def _model_free_depths(
        self,
        states: Sequence[GoodputState],
        learned: SharedEstimates,
        latency: Latency,
        at: tuple[int, int],
        *,
        worths: Sequence[float],
        price: float,
    ) -> Sequence[int | None]:
        """Return the depths of model-free drafts; `None` without such drafters."""
        shared = states[0].shared
        limit = max(
            (one.max_depth for one in shared.members if one.name in shared.model_free), default=0
        )
        deepest = min(self.max_window, limit)
        if not deepest:
            return [None] * len(states)
        usual = learned.model_free.acceptance(deepest)
        seconds = _charged(
            [latency.verify_s(depth, *at) for depth in range(deepest + 1)],
            [state.model_free_offers.share(learned.model_free_offers.share()) for state in states],
        )
        # All requests of a round learn from a retry.
        is_retry = (learned.pacing.num_planned + 1) % (_RETRY * at[0]) == 0
        depths: list[int | None] = []
        for state, worth in zip(states, worths, strict=True):
            tokens = expected_tokens(state.model_free.acceptance(deepest, usual))
            own = [tokens[depth] - price * spent for depth, spent in enumerate(seconds)]
            best = max(range(1, deepest + 1), key=own.__getitem__)
            depths.append(best if own[best] > worth or is_retry else 0)
        return depths


def _learned(shared: SharedState) -> SharedEstimates:
    return shared.notes.setdefault("goodput", SharedEstimates())


def _charged(seconds: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return seconds by depth, from 0 on, charged to the requests that draft.

    A round is as long as its deepest draft, also for the requests that do not draft.

    Args:
        seconds: Seconds of a round by depth, from 0 on.
        shares: How often each request drafts, above 0.
    """
    chance_of_any = 1.0 - math.prod(1.0 - share for share in shares)
    weight = chance_of_any * len(shares) / sum(shares)
    return [seconds[0] + weight * (spent - seconds[0]) for spent in seconds]


def _marginal(price: float, seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the value in tokens of the further seconds of each level."""
    return tuple(
        max(0.0, price * (after - before))
        for before, after in zip(seconds, seconds[1:], strict=False)
    )
