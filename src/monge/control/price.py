"""Draft while a token's chance of being accepted is worth the price of its time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from monge.control.base import PLAIN, Controller, Memory, check_windows, costs_of
from monge.control.calibration import Calibration
from monge.control.price_batch import TRIAL_ROWS, Crowd, batch_gains, batch_seconds, tried
from monge.control.price_memory import note_crowd, note_off, note_rest, note_shared_rest, pooled_of, teach
from monge.control.price_outlook import Outlook, measured_rounds, predicted_seconds, prices, unstopped
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
_BATCH_BASELINE = 32  # the same for a batch: its size and the length of its texts change
_STEEP = 4  # how much longer a batch rests after a trial that failed: several of its requests were tried at once
_READING = 8  # how much faster than one by one the draft model is taken to read tokens, until it is known better
_TRIAL_DEPTH = 2  # of a batch, which waits for it
_GAIN = 1.1  # what drafting must promise a batch that does not draft yet, as it pays at once and gains only in the end
_ALONE_FOR = 4  # tokens that a request waits where others shared rounds and rested: more of these may be on their way
_GROWING_SHARE = 0.05  # of the time of plain decoding, that trials may take while rests still grow
_SETTLED = 8  # rounds after which a request that speculates again counts as settled
_FIRST_WEIGHT = 4.0  # rounds that the first guess of acceptance counts for
_KIN = 6.0  # further rounds that earlier requests count for in a request's acceptance, once they had as many


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
        was_shared: Whether the last round was a batch's, so that the batch decided.
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
    was_shared: bool = False


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
        waits = _ALONE_FOR if costs_of(memory, "price").batch_size > 1 and not pooled.crowd.is_on else 0
        if pooled.off_tokens <= self.first_off or outlook.speed >= outlook.plain_speed * (1.0 + self.margin):
            return replace(request, off_left=waits)
        # Where the last requests gave up for long, a new one goes on resting: it may be too short for a rest of its own.
        left = max(waits, pooled.off_tokens - pooled.rested)
        return replace(request, off_left=left, off_tokens=pooled.off_tokens, trial_left=0 if left else self.trial)

    def rests(self, memory: Memory, num_requests: int) -> bool:
        pooled = pooled_of(memory)
        if max(num_requests, costs_of(memory, "price").batch_size) > 1:
            return not pooled.crowd.is_on  # a trial reads what it needs
        return self.init(memory).off_left > 0

    def plan(self, state: Request, draws: Draws) -> DraftPlan:
        return self.plan_many([state], [draws])[0]

    def plan_many(self, states: Sequence[Request], draws: Sequence[Draws]) -> list[DraftPlan]:
        num_rows = max(len(states), costs_of(states[0].memory, "price").batch_size)
        return [self._alone(states[0])] if num_rows == 1 else self._together(states, num_rows)

    def update(self, state: Request, record: StepRecord) -> Request:
        context = record.context_length + len(record.token_ids)
        if record.plan.max_depth == 0:
            return self._rested(state, record, context)
        seconds = predicted_seconds(state.memory, record)
        tokens = record.num_accepted + 1
        teach(state.memory, record, tokens, seconds)
        if record.batch_size > 1:
            note_crowd(state.memory, pooled_of(state.memory).crowd.met(tokens, *measured_rounds(state.memory, record)))
        following = replace(
            state,
            counts=state.counts.update(record, _REQUEST_KEEP),
            tokens=_SHORT_KEEP * state.tokens + tokens,
            seconds=_SHORT_KEEP * state.seconds + seconds,
            context_length=context,
            trial_left=max(0, state.trial_left - 1),
            rounds_on=state.rounds_on + 1,
            outlook=None,
            was_shared=record.batch_size > 1,
        )
        # Whether those who share a round go on is decided when the next one is planned.
        return following if following.was_shared else self._switched(following)

    def outlook(self, state: Request) -> Outlook:
        """Expected tokens and seconds of the coming round's windows."""
        costs, pooled = costs_of(state.memory, "price"), pooled_of(state.memory)
        usual = pooled.counts.acceptance(self.max_window, weight=_FIRST_WEIGHT)
        acceptance = state.counts.acceptance(self.max_window, usual, PRIOR_WEIGHT + state.kin)
        context = costs.context_length if state.context_length is None else state.context_length
        drafting, verifying = costs.levels_s(self.max_window, costs.batch_size, context)
        seconds = [sum(both) for both in zip(drafting, verifying, strict=True)]
        speed = pooled.tokens / pooled.seconds if pooled.seconds > 0.0 else 0.0
        return Outlook(acceptance, expected_tokens(acceptance), seconds, verifying, max(speed, 1.0 / seconds[0]))

    def _alone(self, state: Request) -> DraftPlan:
        if state.off_left > 0 or (state.rounds_on + 1) % _BASELINE == 0:
            return PLAIN
        outlook, pooled = state.outlook or self.outlook(state), pooled_of(state.memory)
        if state.was_shared and not (pooled.crowd.is_on and self._pays(state, outlook)):
            return PLAIN
        calibration = pooled.calibration
        if calibration.num_rounds == 0:
            return DraftPlan(max_depth=outlook.window, stop=StopRule(draw_prices=(0.0,)), price=outlook.price)
        stop = self._stop(outlook, calibration)
        if state.trial_left > 0 or state.rounds_on % _EXPLORE == _EXPLORE - 1:
            return unstopped(DraftPlan(max_depth=outlook.window, stop=stop, price=outlook.price))
        return DraftPlan(max_depth=self.max_window, stop=stop, price=outlook.price)

    def _together(self, states: Sequence[Request], num_rows: int) -> list[DraftPlan]:
        """One depth for all, the one for which the batch is expected to be done soonest."""
        memory = states[0].memory
        pooled, costs = pooled_of(memory), costs_of(memory, "price")
        crowd, plans = pooled.crowd, [PLAIN] * len(states)
        if crowd.is_resting:
            note_shared_rest(memory)
            return plans
        # Neighbours are evidence enough here: what requests before them did would hide that these differ.
        outlooks = [state.outlook or self.outlook(replace(state, kin=0.0)) for state in states]
        lengths = [costs.context_length if one.context_length is None else one.context_length for one in states]
        context = max(lengths)
        seconds = batch_seconds(costs, self.max_window, num_rows, context)
        gains = batch_gains(costs, seconds, [outlook.tokens for outlook in outlooks], num_rows, context)
        depth = max(range(1, len(gains)), key=gains.__getitem__)
        drafting = set(range(len(states)))
        if crowd.awaits_trial:
            depth, drafting = min(depth, _TRIAL_DEPTH), tried(lengths)
        elif min(gains[depth], crowd.gain) < (_GAIN if crowd.rounds_on < _SETTLED else 1.0 + (_GAIN - 1.0) / 2.0):
            # While it rests the draft model reads nothing, so a trial reads the texts of those who draft in it.
            share = min(1.0, TRIAL_ROWS / num_rows)
            unread_s = max(costs.catch_up_s, share * context * costs.draft_s(1, num_rows) / _READING)
            expected_s = seconds[min(depth, _TRIAL_DEPTH)] - seconds[0] + unread_s
            # One round that took long may have been disturbed: it says how far rests may grow, not how fast.
            longest = self._longest(max(expected_s, (crowd.dearest - 1.0) * seconds[0]), seconds[0])
            off = min(max(_STEEP * crowd.off_tokens, self._longest(expected_s, seconds[0]) // _STEEP), longest)
            note_crowd(memory, Crowd(is_on=False, off_tokens=max(self.first_off, off), rested=1))
            return plans
        else:
            rounds_on = crowd.rounds_on + 1
            off_tokens = 0 if rounds_on == _SETTLED else crowd.off_tokens
            note_crowd(memory, replace(crowd, is_on=True, rounds_on=rounds_on, off_tokens=off_tokens))
            if rounds_on % _BATCH_BASELINE == _BATCH_BASELINE // 8:
                return plans
        for row in drafting:
            stop = self._stop(outlooks[row], pooled.calibration)
            plans[row] = unstopped(DraftPlan(max_depth=depth, stop=stop, price=outlooks[row].price))
        return plans

    def _stop(self, outlook: Outlook, calibration: Calibration) -> StopRule:
        return StopRule(
            bias=calibration.bias,
            slope=calibration.slope,
            temperatures=calibration.temperatures,
            draw_prices=prices(outlook.price, outlook.verifying),
            read_prices=prices(outlook.price, outlook.seconds),
            expected=outlook.acceptance,
            persistence=calibration.persistence,
        )

    def _pays(self, state: Request, outlook: Outlook) -> bool:
        """Whether drafting is expected to beat plain decoding, or did so of late."""
        margin = _GAIN - 1.0 if state.was_shared else self.margin if state.off_tokens else 0.0
        needed = outlook.plain_speed * (1.0 + margin)
        return outlook.speed >= needed or (state.seconds > 0.0 and state.tokens / state.seconds >= needed)

    def _rested(self, state: Request, record: StepRecord, context: int) -> Request:
        """The state after a plain round, and with it a text of `context` tokens."""
        if record.batch_size == 1:
            note_rest(state.memory, len(record.token_ids))
        if state.was_shared and record.batch_size == 1:
            state = replace(state, context_length=context)
            following = replace(state, was_shared=False, outlook=None)
            if not state.off_left and not self._pays(state, self.outlook(state)):
                return self._off(following)
            waits = 0 if pooled_of(state.memory).crowd.is_on else _ALONE_FOR
            return replace(following, off_left=max(state.off_left, waits))
        left = max(0, state.off_left - len(record.token_ids))
        begins = state.off_left > 0 and left == 0
        return replace(
            state,
            counts=state.counts.aged(0.5) if begins else state.counts,
            off_left=left,
            trial_left=self.trial if begins else state.trial_left,
            rounds_on=0 if begins else state.rounds_on + 1,
            context_length=context,
            outlook=None,
            was_shared=record.batch_size > 1,
        )

    def _switched(self, state: Request) -> Request:
        """The state with speculation off if it does not pay."""
        outlook = self.outlook(state)
        if state.trial_left > 0 or self._pays(state, outlook):
            if state.rounds_on == _SETTLED and state.off_tokens:
                note_off(state.memory, 0)
                return replace(state, off_tokens=0, outlook=outlook)
            return replace(state, outlook=outlook)
        return self._off(state)

    def _off(self, state: Request) -> Request:
        """The state at the beginning of a rest."""
        outlook = self.outlook(state)
        lost = self.trial * outlook.loss_s + costs_of(state.memory, "price").catch_up_s
        longest = self._longest(lost, outlook.seconds[0])
        # Where text must be read for a trial, rests that only doubled from a short one would be full of trials.
        shortest = math.ceil(lost / (_GROWING_SHARE * outlook.seconds[0]))
        off = max(self.first_off, min(max(2 * state.off_tokens, shortest), longest))
        note_off(state.memory, off)
        return replace(state, off_left=off, off_tokens=off, tokens=0.0, seconds=0.0, outlook=None)

    def _longest(self, lost_s: float, plain_s: float) -> int:
        """Tokens of a rest after which a trial without success, which loses so much, takes its share of the time."""
        return max(self.first_off, min(self.last_off, math.ceil(lost_s / (self.probe_share * plain_s))))
