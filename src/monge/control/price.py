"""Draft while a token's chance of being accepted is worth the price of its time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from monge.control.base import PLAIN, Controller, Memory, check_windows, costs_of
from monge.control.calibration import Calibration
from monge.control.price_batch import TRIAL_ROWS, Crowd, batch_gains, batch_seconds, tried
from monge.control.price_learning import learnt, teach_left
from monge.control.price_memory import pooled_of
from monge.control.price_outlook import Outlook, plain_has_moved, stop_rule, unstopped
from monge.control.price_reading import coming_back_s, reading_s, repays_reading
from monge.control.price_request import Request
from monge.control.price_stretch import Stretch
from monge.control.survival import PRIOR_WEIGHT, expected_tokens
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.stopping import StopRule
from monge.core.verdict import StepRecord

_EXPLORE = 32  # rounds between two that draft without looking at the price, so that low confidences are tried too
_WHOLE = (14, 15)  # of so many rounds, those that run as one, if any can: what is not run is not measured
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
_LOOK_S = 0.06  # seconds of alike rounds that share one look at what they bring: a look is not to cost a percent
_PATIENCE = 4.0  # plain rounds by which they may be behind plain decoding before one looks earlier
_APART = (*_WHOLE, _EXPLORE - 1)  # of so many rounds, those that are planned apart, to stay informed
_STRIDE = 8  # tokens by which a request's text may have grown unnoted while it rests
_KIN = 6.0  # further rounds that earlier requests count for in a request's acceptance, once they had as many


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
        teach_left(memory)
        pooled = pooled_of(memory)
        if (begun := pooled.taken()) is not None:
            return begun
        kin = min(_KIN, pooled.counts.reached[0] if pooled.counts.reached else 0.0)
        request = Request(memory, kin, debt_s=pooled.debt_s)
        outlook = self.outlook(request)
        waits = _ALONE_FOR if costs_of(memory, "price").batch_size > 1 and not pooled.crowd.is_on else 0
        off = pooled.off_tokens
        if not repays_reading(memory, outlook):
            off = max(off, self._shortest(reading_s(memory), outlook))
        elif off <= self.first_off or outlook.speed >= outlook.plain_speed * (1.0 + self.margin):
            return replace(request, off_left=waits)
        # Where the last requests gave up for long, a new one goes on resting: it may be too short for a rest of its own.
        left = max(waits, off - pooled.rested)
        return replace(request, off_left=left, off_tokens=off, trial_left=0 if left else self.trial)

    def rests(self, memory: Memory, num_requests: int) -> bool:
        pooled = pooled_of(memory)
        if max(num_requests, costs_of(memory, "price").batch_size) > 1:
            return not pooled.crowd.is_on  # a trial reads what it needs
        pooled.begin(begun := self.init(memory))
        return begun.off_left > 0

    def plan(self, state: Request, draws: Draws) -> DraftPlan:
        return self.plan_many([state], [draws])[0]

    def plan_many(self, states: Sequence[Request], draws: Sequence[Draws]) -> list[DraftPlan]:
        if len(states) == 1 and (stretch := states[0].stretch) is not None:
            is_apart = (states[0].rounds_on + len(stretch.records)) % _EXPLORE in _APART
            return [self._alone(states[0]) if is_apart or plain_has_moved(states[0].memory) else stretch.plan]
        num_rows = max(len(states), costs_of(states[0].memory, "price").batch_size)
        return [self._alone(states[0])] if num_rows == 1 else self._together(states, num_rows)

    def update(self, state: Request, record: StepRecord) -> Request:
        if state.stretch is not None and state.stretch.takes(record):
            return state
        if record.plan.max_depth == 0 and record.batch_size > 1 and state.is_lasting(record, _STRIDE):
            return state
        if record.plan.max_depth == 0 and record.batch_size == 1 and state.rests_on(record, _STRIDE):
            pooled_of(state.memory).rest(record, begins=False)
            return state
        begins = state.context_length is None or state.was_shared
        if record.plan.max_depth == 0:
            if record.batch_size == 1:
                pooled_of(state.memory).rest(record, begins=begins)
            return self._rested(learnt(state), record)
        following = learnt(state, record, begins=begins)
        # Whether those who share a round go on is decided when the next one is planned.
        return following if following.was_shared else self._switched(following)

    def outlook(self, state: Request) -> Outlook:
        """Expected tokens and seconds of the coming round's windows."""
        costs, pooled = costs_of(state.memory, "price"), pooled_of(state.memory)
        deepest = costs.within(self.max_window)
        usual = pooled.counts.acceptance(deepest, weight=_FIRST_WEIGHT)
        acceptance = state.counts.acceptance(deepest, usual, PRIOR_WEIGHT + state.kin)
        context = costs.context_length if state.context_length is None else state.context_length
        drafting, verifying = costs.levels_s(deepest, costs.batch_size, context)
        seconds = [sum(both) for both in zip(drafting, verifying, strict=True)]
        whole, price = costs.whole, max(pooled.speed, 1.0 / seconds[0])
        fits = whole is not None and costs.batch_size == 1 and whole.depth <= deepest
        as_one = (whole.depth, whole.plain_rounds * seconds[0]) if whole is not None and fits else None
        return Outlook(acceptance, expected_tokens(acceptance), seconds, verifying, price, as_one)

    def _alone(self, state: Request) -> DraftPlan:
        rounds_on = state.rounds_on + (0 if state.stretch is None else len(state.stretch.records))
        if state.off_left > 0 or plain_has_moved(state.memory) or (rounds_on + 1) % _BASELINE == 0:
            return PLAIN
        outlook, pooled = state.outlook or self.outlook(state), pooled_of(state.memory)
        if state.was_shared and not (pooled.crowd.is_on and self._pays(state, outlook)):
            return PLAIN
        usual, place = self._usual(outlook, pooled.calibration), rounds_on % _EXPLORE
        if pooled.calibration.num_rounds == 0:
            return usual
        # Rounds as one ask for no confidence, so low ones need to be known the less while those are ahead.
        explores = place == _EXPLORE - 1 and (not outlook.as_one or rounds_on % _BASELINE == _EXPLORE - 1)
        if outlook.whole is not None and place in _WHOLE:
            return DraftPlan(max_depth=outlook.whole[0], price=outlook.price)
        if explores or (state.trial_left > 0 and not outlook.as_one):
            stop = stop_rule(outlook, pooled.calibration)
            return unstopped(DraftPlan(max_depth=outlook.window, stop=stop, price=outlook.price))
        return usual

    def _usual(self, outlook: Outlook, calibration: Calibration) -> DraftPlan:
        """What is planned for rounds that neither try anything nor keep the controller informed."""
        if calibration.num_rounds == 0:
            return DraftPlan(max_depth=outlook.window, stop=StopRule(draw_prices=(0.0,)), price=outlook.price)
        if outlook.whole is not None and outlook.as_one:
            return DraftPlan(max_depth=outlook.whole[0], price=outlook.price)
        return DraftPlan(max_depth=self.max_window, stop=stop_rule(outlook, calibration), price=outlook.price)

    def _stretch(self, state: Request, outlook: Outlook) -> Stretch | None:
        """The coming rounds that are planned alike; a trial has none."""
        if state.trial_left:
            return None
        pooled, whole_s = pooled_of(state.memory), outlook.whole[1] if outlook.whole else 0.0
        num_rounds = math.ceil(_LOOK_S / (whole_s if outlook.as_one else outlook.seconds[outlook.window]))
        if state.off_tokens and state.rounds_on < _SETTLED:
            num_rounds = min(num_rounds, _SETTLED - state.rounds_on)
        limit_s = max(coming_back_s(state.memory), _PATIENCE * outlook.seconds[0])
        patience_s = limit_s if state.debt_s < limit_s else state.debt_s + _PATIENCE / 2.0 * outlook.seconds[0]
        plan = self._usual(outlook, pooled.calibration)
        pooled.stretch = Stretch(plan, num_rounds, patience_s, outlook.seconds, whole_s, state.debt_s)
        return pooled.stretch

    def _together(self, states: Sequence[Request], num_rows: int) -> list[DraftPlan]:
        """One depth for all, the one for which the batch is expected to be done soonest."""
        memory = states[0].memory
        pooled, costs = pooled_of(memory), costs_of(memory, "price")
        crowd, plans = pooled.crowd, [PLAIN] * len(states)
        if crowd.is_resting:
            pooled.rest_together()
            return plans
        # Neighbours are evidence enough here: what requests before them did would hide that these differ.
        outlooks = [state.outlook or self.outlook(replace(state, kin=0.0)) for state in states]
        lengths = [costs.context_length if one.context_length is None else one.context_length for one in states]
        context = max(lengths)
        seconds = batch_seconds(costs, costs.within(self.max_window), num_rows, context)
        gains = batch_gains(costs, seconds, [outlook.tokens for outlook in outlooks], num_rows, context)
        depth = max(range(1, len(gains)), key=gains.__getitem__)
        drafting = set(range(len(states)))
        if crowd.awaits_trial:
            depth, drafting = min(depth, _TRIAL_DEPTH), tried(lengths)
        elif min(gains[depth], crowd.gain) < (_GAIN if crowd.rounds_on < _SETTLED else 1.0 + (_GAIN - 1.0) / 2.0):
            # While it rests the draft model reads nothing, so a trial reads the texts of those who draft in it.
            unread_s = max(costs.catch_up_s, min(1.0, TRIAL_ROWS / num_rows) * context * costs.draft_s(1, num_rows) / _READING)
            expected_s = seconds[min(depth, _TRIAL_DEPTH)] - seconds[0] + unread_s
            # One round that took long may have been disturbed: it says how far rests may grow, not how fast.
            longest = self._longest(max(expected_s, (crowd.dearest - 1.0) * seconds[0]), seconds[0])
            off = min(max(_STEEP * crowd.off_tokens, self._longest(expected_s, seconds[0]) // _STEEP), longest)
            pooled.crowd = Crowd(is_on=False, off_tokens=max(self.first_off, off), rested=1)
            return plans
        else:
            rounds_on = crowd.rounds_on + 1
            off_tokens = 0 if rounds_on == _SETTLED else crowd.off_tokens
            pooled.crowd = replace(crowd, is_on=True, rounds_on=rounds_on, off_tokens=off_tokens)
            if rounds_on % _BATCH_BASELINE == _BATCH_BASELINE // 8:
                return plans
        for row in drafting:
            stop = stop_rule(outlooks[row], pooled.calibration)
            plans[row] = unstopped(DraftPlan(max_depth=depth, stop=stop, price=outlooks[row].price))
        return plans

    def _pays(self, state: Request, outlook: Outlook) -> bool:
        """Whether drafting is expected to beat plain decoding, or did so of late."""
        margin = _GAIN - 1.0 if state.was_shared else self.margin if state.off_tokens else 0.0
        needed = outlook.plain_speed * (1.0 + margin)
        return outlook.speed >= needed or (state.seconds > 0.0 and state.tokens / state.seconds >= needed)

    def _rested(self, state: Request, record: StepRecord) -> Request:
        """The state after a plain round."""
        context = record.context_length + len(record.token_ids)
        if state.was_shared and record.batch_size == 1:
            state = replace(state, context_length=context)
            following = replace(state, was_shared=False, outlook=None)
            if not state.off_left and not self._pays(state, self.outlook(state)):
                return self._off(following)
            waits = 0 if pooled_of(state.memory).crowd.is_on else _ALONE_FOR
            return replace(following, off_left=max(state.off_left, waits))
        left = max(0, state.off_left - max(state.grown(record), len(record.token_ids)))
        begins = state.off_left > 0 and left == 0
        # Spelled out, since it happens in every round of a request that rests, and `replace` is slow.
        return Request(
            state.memory,
            state.kin,
            state.counts.aged(0.5) if begins else state.counts,
            state.tokens,
            state.seconds,
            state.debt_s,
            context,
            left,
            state.off_tokens,
            self.trial if begins else state.trial_left,
            0 if begins else state.rounds_on + 1,
            was_shared=record.batch_size > 1,
        )

    def _switched(self, state: Request) -> Request:
        """The state with speculation off if it does not pay."""
        outlook, pooled = self.outlook(state), pooled_of(state.memory)
        pays = self._pays(state, outlook)
        # Coming back has a price, so drafting goes on until it has lost as much. A trial that fails ends at once.
        if not pays and not state.trial_left and (state.off_tokens or state.debt_s >= coming_back_s(state.memory)):
            return self._off(state)
        following = replace(state, outlook=outlook, stretch=self._stretch(state, outlook))
        is_settled = state.rounds_on >= _SETTLED
        if not pays or not state.off_tokens or not (is_settled or state.rounds_on == self.trial):
            return following
        # What is read is read, and the request drafts on. Others may be too short to be worth their reading.
        repays = repays_reading(state.memory, outlook)
        if is_settled == repays:
            pooled.switch_off(0 if repays else self._next_rest(state, outlook))
        return replace(following, off_tokens=0) if is_settled else following

    def _off(self, state: Request) -> Request:
        """The state at the beginning of a rest."""
        off = self._next_rest(state, self.outlook(state))
        pooled = pooled_of(state.memory)
        pooled.switch_off(off)
        pooled.debt_s = 0.0
        return replace(state, off_left=off, off_tokens=off, tokens=0.0, seconds=0.0, debt_s=0.0, outlook=None)

    def _next_rest(self, state: Request, outlook: Outlook) -> int:
        """Tokens of the rest that follows a trial."""
        lost = self.trial * outlook.loss_s + coming_back_s(state.memory)
        longest = self._longest(lost, outlook.seconds[0])
        return max(self.first_off, min(max(2 * state.off_tokens, self._shortest(lost, outlook)), longest))

    def _shortest(self, lost_s: float, outlook: Outlook) -> int:
        """Tokens of a first rest: where text must be read for a trial, rests that only doubled would be full of trials."""
        return math.ceil(lost_s / (_GROWING_SHARE * outlook.seconds[0]))

    def _longest(self, lost_s: float, plain_s: float) -> int:
        """Tokens of a rest after which a trial without success, which loses so much, takes its share of the time."""
        return max(self.first_off, min(self.last_off, math.ceil(lost_s / (self.probe_share * plain_s))))
