"""Draft while a token's chance of being accepted is worth the price of its time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from monge.control.base import PLAIN, Controller, Memory, check_windows, costs_of
from monge.control.calibration import Calibration
from monge.control.price_memory import note_off, note_rest, pooled_of, teach
from monge.control.survival import PRIOR_WEIGHT, DepthCounts, expected_tokens
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.stopping import StopRule
from monge.core.verdict import StepRecord

_REQUEST_KEEP = 0.9  # weight that a round keeps with every later one, in a request's acceptance
_SHORT_KEEP = 0.85  # and in the speed that decides whether speculation goes on
_EXPLORE = 32  # rounds between two that draft without looking at the price, so that low confidences are tried too
_BASELINE = 128  # rounds between two plain ones, which keep the cost of plain decoding up to date
_RESTED = 64  # plain rounds of a batch between two in which it drafts to learn
_GAIN = 1.1  # what drafting must promise a batch: its requests do not end together, and the last ones are decoded alone
_SETTLED = 8  # rounds after which a request that speculates again counts as settled
_FIRST_WEIGHT = 4.0  # rounds that the first guess of acceptance counts for
_KIN = 6.0  # further rounds that earlier requests count for in a request's acceptance, once they had as many


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a round is expected to bring, by window from 0 on, and the price of a second in tokens."""

    acceptance: tuple[float, ...]
    tokens: Sequence[float]
    seconds: Sequence[float]
    verifying: Sequence[float]
    price: float

    @property
    def speed(self) -> float:
        """Largest expected tokens per second of a round that drafts."""
        return max(tokens / seconds for tokens, seconds in zip(self.tokens[1:], self.seconds[1:], strict=True))

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding."""
        return 1.0 / self.seconds[0]

    @property
    def window(self) -> int:
        """The drafting window of largest worth: tokens less the price of their time."""
        windows = range(1, len(self.tokens))
        return max(windows, key=lambda window: self.tokens[window] - self.price * self.seconds[window])


@dataclass(frozen=True, slots=True)
class Request:
    """State of one request.

    Args:
        memory: What the decoder's requests share.
        kin: Rounds beyond the usual ones that requests before it count for in its acceptance.
        counts: Acceptance by depth in this request.
        tokens: Tokens of the last rounds, the latest counting most.
        seconds: Their predicted seconds.
        context_length: Tokens of the text so far, once a round has said so.
        off_left: Tokens to be decoded plainly before speculation is tried again.
        off_tokens: How many there were when it was last switched off; 0 while it is settled.
        trial_left: Rounds of the present trial that are left.
        rounds_on: Rounds since it was switched on.
        outlook: What the coming round is expected to bring, if it is known already.
    """

    memory: Memory
    kin: float = 0.0
    counts: DepthCounts = DepthCounts()
    tokens: float = 0.0
    seconds: float = 0.0
    context_length: int | None = None
    off_left: int = 0
    off_tokens: int = 0
    trial_left: int = 0
    rounds_on: int = 0
    outlook: Outlook | None = None


@dataclass(frozen=True, slots=True)
class Price(Controller[Request]):
    """Draft while a token's chance of being accepted is at least the price of its time; not at all where plain decoding wins.

    The policy of most tokens per second maximises tokens - price * seconds with the best attainable speed as the price, so a
    marginal token is worth drafting iff its survival >= price * its marginal seconds. Survival comes from the acceptance by
    depth of this request, of others before it, and, where the drafter has a network, from the network's confidence before
    each draw; seconds from the decoder's cost table; the price is the running speed, and never below that of plain decoding.

    Where the expected and the recent speed fall below plain decoding's, the drafter rests for `first_off` tokens; then a
    trial of `trial` rounds must beat plain decoding by the share `margin`, or the rest is doubled, until trials that fail take
    the share `probe_share` of the time, or up to `last_off` tokens.

    Args:
        max_window: Largest window; at most the tree builder's own depth has an effect.
        first_off: Tokens of the first rest.
        last_off: Tokens of the longest rest.
        trial: Rounds of a trial.
        margin: Share by which a trial must beat plain decoding.
        probe_share: Share of the time of plain decoding that trials may take while speculation does not pay.

    Reference:
        Renewal-reward argument of Dinkelbach, 1967; sequential temperature scaling: DSpark, arXiv 2607.05147; own design.
    """

    max_window: int = 8
    first_off: int = 8
    last_off: int = 1024
    trial: int = 1
    margin: float | int = 0.02
    probe_share: float | int = 0.005

    reads = frozenset({"accepted", "confidence", "costs", "notes"})

    def __post_init__(self) -> None:
        check_windows("price", lowest=1, highest=self.max_window)
        if not 1 <= self.first_off <= self.last_off or self.trial < 1 or not self.margin >= 0.0 or not self.probe_share > 0.0:
            raise OptionError(
                "price: need 1 <= first_off <= last_off, trial >= 1, margin >= 0 and probe_share > 0; got "
                f"{self.first_off}, {self.last_off}, {self.trial}, {self.margin}, {self.probe_share}"
            )

    def init(self, memory: Memory) -> Request:
        pooled = pooled_of(memory)
        request = Request(memory, min(_KIN, pooled.counts.reached[0] if pooled.counts.reached else 0.0))
        outlook = self.outlook(request)
        if pooled.off_tokens <= self.first_off or outlook.speed >= outlook.plain_speed * (1.0 + self.margin):
            return request
        # Where the last requests gave up for long, a new one goes on resting: it may be too short for a rest of its own.
        left = max(0, pooled.off_tokens - pooled.rested)
        return replace(request, off_left=left, off_tokens=pooled.off_tokens, trial_left=0 if left else self.trial)

    def plan(self, state: Request, draws: Draws) -> DraftPlan:
        if state.off_left > 0 or (state.rounds_on + 1) % _BASELINE == 0:
            return PLAIN
        outlook, calibration = state.outlook or self.outlook(state), pooled_of(state.memory).calibration
        if calibration.num_rounds == 0:
            return DraftPlan(max_depth=outlook.window, stop=StopRule(draw_prices=(0.0,)), price=outlook.price)
        stop = self._stop(outlook, calibration)
        if state.trial_left > 0 or state.rounds_on % _EXPLORE == _EXPLORE - 1:
            return _unstopped(DraftPlan(max_depth=outlook.window, stop=stop, price=outlook.price))
        return DraftPlan(max_depth=self.max_window, stop=stop, price=outlook.price)

    def plan_many(self, states: Sequence[Request], draws: Sequence[Draws]) -> list[DraftPlan]:
        if len(states) == 1:
            return [self.plan(states[0], draws[0])]
        outlooks = [state.outlook or self.outlook(state) for state in states]
        shared, pooled = self._shared_depth(states, outlooks), pooled_of(states[0].memory)
        depth = shared or int(pooled.rested >= _RESTED * len(states))
        if (states[0].rounds_on + 1) % _BASELINE == 0:
            depth = 0
        if depth == 0:
            return [PLAIN] * len(states)
        stops = [self._stop(outlook, pooled.calibration) for outlook in outlooks]
        return [
            _unstopped(DraftPlan(max_depth=depth, stop=stop, price=outlook.price))
            for stop, outlook in zip(stops, outlooks, strict=True)
        ]

    def update(self, state: Request, record: StepRecord) -> Request:
        context = record.context_length + len(record.token_ids)
        if record.plan.max_depth == 0:
            left = max(0, state.off_left - len(record.token_ids))
            note_rest(state.memory, len(record.token_ids))
            begins = state.off_left > 0 and left == 0
            counts = state.counts.aged(0.5) if begins else state.counts
            trial = self.trial if begins else state.trial_left
            rounds_on = 0 if begins else state.rounds_on + 1
            return replace(
                state, counts=counts, context_length=context, off_left=left, trial_left=trial, rounds_on=rounds_on, outlook=None
            )
        seconds = _seconds(state.memory, record)
        tokens = record.num_accepted + 1
        teach(state.memory, record, tokens, seconds)
        following = replace(
            state,
            counts=state.counts.update(record, _REQUEST_KEEP),
            tokens=_SHORT_KEEP * state.tokens + tokens,
            seconds=_SHORT_KEEP * state.seconds + seconds,
            context_length=context,
            trial_left=max(0, state.trial_left - 1),
            rounds_on=state.rounds_on + 1,
        )
        return self._switched(following)

    def outlook(self, state: Request) -> Outlook:
        """Expected tokens and seconds of the coming round's windows."""
        costs, pooled = costs_of(state.memory, "price"), pooled_of(state.memory)
        usual = pooled.counts.acceptance(self.max_window, weight=_FIRST_WEIGHT)
        acceptance = state.counts.acceptance(self.max_window, usual, PRIOR_WEIGHT + state.kin)
        context = state.context_length
        drafting, verifying = costs.levels_s(self.max_window, costs.batch_size, context)
        seconds = [sum(both) for both in zip(drafting, verifying, strict=True)]
        speed = pooled.tokens / pooled.seconds if pooled.seconds > 0.0 else 0.0
        return Outlook(acceptance, expected_tokens(acceptance), seconds, verifying, max(speed, 1.0 / seconds[0]))

    def _stop(self, outlook: Outlook, calibration: Calibration) -> StopRule:
        return StopRule(
            bias=calibration.bias,
            slope=calibration.slope,
            temperatures=calibration.temperatures,
            draw_prices=_prices(outlook.price, outlook.verifying),
            read_prices=_prices(outlook.price, outlook.seconds),
            expected=outlook.acceptance,
            persistence=calibration.persistence,
        )

    def _shared_depth(self, states: Sequence[Request], outlooks: Sequence[Outlook]) -> int:
        """The depth for which the batch is expected to be fastest: all wait for the deepest draft, so all draft as deep."""
        costs = costs_of(states[0].memory, "price")
        context = max((state.context_length for state in states if state.context_length is not None), default=None)
        seconds = map(sum, zip(*costs.levels_s(self.max_window, len(states), context), strict=True))
        tokens = map(sum, zip(*(outlook.tokens for outlook in outlooks), strict=True))
        speeds = [gained / spent for gained, spent in zip(tokens, seconds, strict=True)]
        best = max(speeds)
        return speeds.index(best) if best >= _GAIN * speeds[0] else 0

    def _switched(self, state: Request) -> Request:
        """The state with speculation off if it does not pay."""
        outlook = self.outlook(state)
        if state.off_left > 0:
            return replace(state, outlook=outlook)  # it drafts since its batch does
        needed = outlook.plain_speed * (1.0 + (self.margin if state.off_tokens else 0.0))
        pays = outlook.speed >= needed or state.tokens / state.seconds >= needed
        if state.trial_left > 0 or pays:
            if state.rounds_on == _SETTLED and state.off_tokens:
                note_off(state.memory, 0)
                return replace(state, off_tokens=0, outlook=outlook)
            return replace(state, outlook=outlook)
        off = min(2 * state.off_tokens, self._longest_rest(state, outlook)) if state.off_tokens else self.first_off
        note_off(state.memory, off)
        return replace(state, off_left=off, off_tokens=off, tokens=0.0, seconds=0.0, outlook=None)

    def _longest_rest(self, state: Request, outlook: Outlook) -> int:
        """Tokens of plain decoding after which a trial, even if nothing of it is accepted, takes its share of the time."""
        lost = self.trial * (outlook.seconds[outlook.window] - outlook.seconds[0]) + costs_of(state.memory, "price").catch_up_s
        return max(self.first_off, min(self.last_off, math.ceil(lost / (self.probe_share * outlook.seconds[0]))))


def _prices(price: float, seconds: Sequence[float]) -> tuple[float, ...]:
    """Tokens that each level's further seconds are worth."""
    return tuple(max(0.0, price * (after - before)) for before, after in zip(seconds, seconds[1:], strict=False))


def _unstopped(plan: DraftPlan) -> DraftPlan:
    """The plan with prices that stop nothing; the forecasts stay in the record."""
    return plan if plan.stop is None else replace(plan, stop=replace(plan.stop, draw_prices=(0.0,), read_prices=()))


def _seconds(memory: Memory, record: StepRecord) -> float:
    """Predicted seconds of a finished round: the text, not the clock, decides what a request learns."""
    costs = costs_of(memory, "price")
    reads = max(record.depth, record.levels_read)
    drafted = costs.draft_s(reads, record.batch_size) if reads else 0.0
    return costs.verify_s(record.num_nodes, record.batch_size, record.context_length) + drafted
