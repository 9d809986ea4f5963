"""Draft while a token's chance of being accepted is worth the price of its time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from monge.control.base import PLAIN, Controller, Memory, check_windows, costs_of
from monge.control.price_apart import Apart
from monge.control.price_forecast import outlook_of
from monge.control.price_learning import learnt, teach_left
from monge.control.price_looks import next_stretch, patience_s
from monge.control.price_memory import pooled_of
from monge.control.price_outlook import Outlook, stop_rule, unstopped, usual_plan
from monge.control.price_reading import beginning_s, coming_back_s, reading_s, repays_reading
from monge.control.price_request import Request
from monge.control.price_resting import STRIDE, is_resting_news, looked, resting_plan, resting_stands
from monge.control.price_rests import Rests
from monge.control.price_together import GAIN, SETTLED, plan_together
from monge.control.survival import PRIOR_WEIGHT
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.verdict import StepRecord

_ALONE_FOR = 4  # tokens that a request waits where others shared rounds and rested: more of these may be on their way
_OPENING = 2  # how many times as many share a look at how requests begin


@dataclass(frozen=True, slots=True)
class Price(Controller[Request]):
    """Draft while a token's chance of being accepted is at least the price of its time; not at all where plain decoding wins.

    The policy of most tokens per second maximises tokens - price * seconds with the best attainable speed as the price, so a
    marginal token is worth drafting iff its survival >= price * its marginal seconds. Survival comes from the acceptance by
    depth of this request, of others before it, and, where the drafter has a network, from the network's confidence before
    each draw; seconds from the decoder's cost table; the price is the running speed, and never below that of plain decoding.

    Where the expected speed does not exceed plain decoding's by the share `margin`, the drafter rests for `first_off` tokens;
    then some rounds try it again, or the rest is doubled, until trials that fail take the share `probe_share` of the time,
    or up to `last_off` tokens.

    Args:
        max_window: Largest window; at most the tree builder's own depth has an effect.
        first_off: Tokens of the first rest.
        last_off: Tokens of the longest rest.
        trial: Fewest rounds of a trial, which has more where they are expected to lose less than coming back costs.
        margin: Share by which drafting must beat plain decoding: it makes the plain rounds behind it dearer.
        probe_share: Share of the time of plain decoding that trials may take while speculation does not pay.

    Reference:
        Renewal-reward argument of Dinkelbach, 1967; sequential temperature scaling: DSpark, arXiv 2607.05147; own design.
    """

    max_window: int = 8
    first_off: int = 8
    last_off: int = 8192
    trial: int = 1
    margin: float | int = 0.02
    probe_share: float | int = 0.005

    reads = frozenset({"accepted", "tokens", "confidence", "costs", "notes"})
    selects = True

    def __post_init__(self) -> None:
        check_windows("price", lowest=1, highest=self.max_window)
        if not 1 <= self.first_off <= self.last_off or self.trial < 1 or not self.margin >= 0.0 or not self.probe_share > 0.0:
            raise OptionError(
                "price: need 1 <= first_off <= last_off, trial >= 1, margin >= 0 and probe_share > 0; got "
                f"{self.first_off}, {self.last_off}, {self.trial}, {self.margin}, {self.probe_share}"
            )

    def init(self, memory: Memory) -> Request:
        pooled = pooled_of(memory)
        is_alone = costs_of(memory, "price").batch_size == 1
        if (begun := pooled.taken() or (self._begun_again(memory) if is_alone else None)) is not None:
            return begun
        teach_left(memory)
        request = Request(memory, min(pooled.spread.weight - PRIOR_WEIGHT, pooled.seen), debt_s=pooled.debt_s)
        request = replace(request, resting_depth=(outlook := outlook_of(request, self.max_window)).resting_depth)
        waits = 0 if is_alone or pooled.crowd.is_on else _ALONE_FOR
        off, needed_s = pooled.off_tokens, beginning_s(memory)
        if not repays_reading(memory, outlook, needed_s):
            off = max(off, self._rests.shortest(needed_s, outlook))
        elif off <= self.first_off or outlook.pays(self.margin):
            return replace(request, off_left=waits) if waits else self._begun(request, outlook)
        # Where the last requests gave up for long, a new one goes on resting: it may be too short for a rest of its own.
        left = max(waits, off - pooled.rested)
        trial_left = 0 if left else self._rests.trial_rounds(request, outlook)
        return replace(request, off_left=left, off_tokens=off, trial_left=trial_left)

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
            is_apart = stretch.apart.before(states[0].rounds_on + len(stretch.records)) == 0
            is_apart |= costs_of(states[0].memory, "price").wants_plain
            return [self._alone(states[0]) if is_apart else stretch.next_plan]
        num_rows = max(len(states), costs_of(states[0].memory, "price").batch_size)
        return [self._alone(states[0])] if num_rows == 1 else plan_together(states, num_rows, self.max_window, self._rests)

    def stands(self, states: Sequence[Request], plans: Sequence[DraftPlan], num_tokens: Sequence[int]) -> int:
        if len(states) > 1:
            return pooled_of(states[0].memory).rest_on(STRIDE)
        state, plan = states[0], plans[0]
        if (stretch := state.stretch) is not None:
            return max(1, min(stretch.stands(plan), stretch.apart.before(state.rounds_on + len(stretch.records))))
        return resting_stands(state, plan, num_tokens[0])

    def is_news(self, state: Request, record: StepRecord) -> bool:
        if state.stretch is not None:
            return state.stretch.is_news(record)
        return is_resting_news(state, record, self.max_window)

    def update(self, state: Request, record: StepRecord) -> Request:
        return self.update_many(state, (record,))

    def update_many(self, state: Request, records: Sequence[StepRecord]) -> Request:
        if state.stretch is not None:
            records = records[state.stretch.taken(records) :]
        while records:
            # Those of a plan that still stood when the stretch ended are learnt from with it.
            num_drafted = next((place for place, one in enumerate(records) if one.plan.max_depth == 0), len(records))
            num_resting = 0 if num_drafted else state.num_resting(records)
            if num_drafted:
                state = self._after(state, records[:num_drafted])
            elif num_resting:
                state = self._after_rest(state, records[:num_resting])
            else:
                state = self._after_plain(state, records[0])
            records = records[num_drafted or num_resting or 1 :]
        return state

    def _after(self, state: Request, records: Sequence[StepRecord]) -> Request:
        """The state after rounds that were planned to draft."""
        following = learnt(state, records, begins=state.is_new or state.was_shared)
        # Whether those who share a round go on is decided when the next one is planned.
        ends_trial = state.trial_left > 0 and following.trial_left == 0
        return following if following.was_shared else self._switched(following, ends_trial=ends_trial)

    def _after_rest(self, state: Request, records: Sequence[StepRecord]) -> Request:
        """The state after rounds of a rest alone."""
        pooled_of(state.memory).rest(records)
        following = looked(state, records, self.max_window)
        goes_on = following is state and 0 < state.grown(records[-1]) < min(STRIDE, state.off_left)
        return state if goes_on else self._rested(following, records[-1])

    def _after_plain(self, state: Request, record: StepRecord) -> Request:
        """The state after another round that was not."""
        if record.batch_size > 1 and state.is_lasting(record, STRIDE):
            return state
        begins, known = state.is_new or state.was_shared, learnt(state)
        if record.batch_size == 1:
            pooled_of(state.memory).rest([record], begins=begins)
        return self._rested(looked(known, [record], self.max_window), record)

    @property
    def _rests(self) -> Rests:
        return Rests(self.first_off, self.last_off, self.trial, self.probe_share)

    def _alone(self, state: Request) -> DraftPlan:
        stretch = state.stretch
        rounds_on = state.rounds_on + (0 if stretch is None else len(stretch.records))
        known = state.outlook if stretch is None else stretch.outlook
        if state.off_left > 0:
            return resting_plan(state)
        outlook, pooled = known or outlook_of(state, self.max_window), pooled_of(state.memory)
        if costs_of(state.memory, "price").wants_plain or (
            state.was_shared and not (pooled.crowd.is_on and self._pays(state, outlook))
        ):
            return PLAIN
        usual, apart = usual_plan(outlook, pooled.calibration, self.max_window), Apart.of(outlook)
        if state.trial_left > 0 and outlook.lookups is not None:
            usual = replace(usual, lookup_depth=0)  # it is about the others
        if pooled.calibration.num_rounds == 0:
            return usual
        if outlook.whole is not None and apart.is_whole(rounds_on):
            return replace(usual, max_depth=outlook.whole[0], stop=None)
        if apart.explores(rounds_on) or (state.trial_left > 0 and not outlook.as_one):
            stop = stop_rule(outlook, pooled.calibration)
            return unstopped(replace(usual, max_depth=outlook.window, stop=stop))
        return usual

    def _begun(self, state: Request, outlook: Outlook) -> Request:
        """The state of a request that drafts from its beginning: by what others taught, as its first round says little."""
        pooled = pooled_of(state.memory)
        if not pooled.counts.reached or costs_of(state.memory, "price").batch_size > 1:
            return state
        state = replace(state, outlook=outlook, stretch=(first := next_stretch(state, outlook, self.max_window)))
        num_rounds = 0 if first is None else min(_OPENING * first.num_rounds, int(pooled.counts.reached[0]))
        # What the request notes in its stretch is not to show in that of the next one.
        kept = state if first is None else replace(state, stretch=first.again(first.debt_s, first.patience_s))
        pooled.opening = kept, pooled.num_rounds + num_rounds
        return state

    def _begun_again(self, memory: Memory) -> Request | None:
        """The same as the last time, if little happened since: a look is not to cost a percent of short requests either."""
        pooled, needed_s = pooled_of(memory), beginning_s(memory)
        if (opening := pooled.opened) is None or not repays_reading(memory, opening.outlook, needed_s):
            return None
        debt_s, stretch = pooled.stretches[-1].debt_s if pooled.stretches else pooled.debt_s, None
        if opening.stretch is not None:
            stretch = opening.stretch.again(debt_s, patience_s(memory, debt_s, opening.outlook))
            pooled.note_stretch(stretch)
        return replace(opening, debt_s=debt_s, stretch=stretch)

    def _pays(self, state: Request, outlook: Outlook) -> bool:
        """Whether drafting is expected to beat plain decoding."""
        return outlook.pays(GAIN - 1.0 if state.was_shared else self.margin)

    def _rested(self, state: Request, record: StepRecord) -> Request:
        """The state after a plain round."""
        context = record.context_length + len(record.token_ids)
        if state.was_shared and record.batch_size == 1:
            state = replace(state, context_length=context)
            following = replace(state, was_shared=False, outlook=None)
            if not state.off_left and not self._pays(state, outlook_of(state, self.max_window)):
                return self._off(following)
            waits = 0 if pooled_of(state.memory).crowd.is_on else _ALONE_FOR
            return replace(following, off_left=max(state.off_left, waits))
        left = max(0, state.off_left - max(state.grown(record), len(record.token_ids)))
        if begins := state.off_left > 0 and left == 0:
            state = replace(state, counts=state.counts.aged(0.5))
        # Spelled out, since it happens in every round of a request that rests, and `replace` is slow.
        return Request(
            state.memory,
            state.kin,
            state.counts,
            state.debt_s,
            context,
            left,
            state.off_tokens,
            self._rests.trial_rounds(state, outlook_of(state, self.max_window)) if begins else state.trial_left,
            0 if begins else state.rounds_on + 1,
            was_shared=record.batch_size > 1,
            looked=state.looked,
            resting_depth=state.resting_depth,
        )

    def _switched(self, state: Request, *, ends_trial: bool) -> Request:
        """The state with speculation off if it does not pay."""
        outlook, pooled = outlook_of(state, self.max_window), pooled_of(state.memory)
        # Coming back has a price, so drafting goes on until it has lost as much, in a trial too; one that fails ends at once.
        pays, has_lost = self._pays(state, outlook), state.debt_s >= coming_back_s(state.memory)
        is_tried = state.trial_left > 0 and (state.rounds_on < self.trial or not has_lost)
        if not pays and not is_tried and (state.off_tokens or has_lost):
            return self._off(state)
        following = replace(state, outlook=outlook, stretch=next_stretch(state, outlook, self.max_window))
        is_settled = state.rounds_on >= SETTLED
        if not pays or not state.off_tokens or not (is_settled or ends_trial):
            return following
        # What is read is read, and the request drafts on. Others may be too short to be worth their reading.
        repays = repays_reading(state.memory, outlook, reading_s(state.memory))
        if is_settled == repays:
            pooled.switch_off(0 if repays else self._rests.following(state, outlook))
        return replace(following, off_tokens=0) if is_settled else following

    def _off(self, state: Request) -> Request:
        """The state at the beginning of a rest."""
        outlook, pooled = outlook_of(state, self.max_window), pooled_of(state.memory)
        off = self._rests.following(state, outlook)
        pooled.switch_off(off)
        pooled.debt_s = 0.0
        rest = replace(state, off_left=off, off_tokens=off, trial_left=0, debt_s=0.0, outlook=None)
        return replace(rest, resting_depth=outlook.resting_depth)
