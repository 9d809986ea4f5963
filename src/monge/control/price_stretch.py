"""Rounds of a request that `price` plans alike and learns from together: learning from each takes time that short ones lack."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from monge.control.price_apart import Apart
from monge.control.price_looked_up import drafts_of
from monge.control.price_outlook import Outlook
from monge.control.survival import REQUEST_KEEP, DepthCounts
from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord

_FOLLOW_EVERY = 8  # rounds of which one follows what would have been looked up, where most of it would be refused
_MOST_VAIN = 3  # looks at what was looked up that changed nothing, after which eight rounds share one
_TOGETHER = 4  # rounds that are told of together: the last of them may come after those that used its patience up


@dataclass(slots=True)
class Stretch:
    """Alike rounds of a request alone, noted in place.

    Args:
        plan: Of its rounds, but for those that keep the controller informed.
        outlook: What they are expected to bring.
        num_rounds: With so many it ends.
        patience_s: Debt with which it ends before.
        debt_s: See `Request`.
        lookups: Drafters without a network beside others, whose rounds say nothing about what those cost or gain.
        looked: See `Request`.
        apart: Which rounds are planned apart and not by it.
        begins: Whether a spell begins with its first round, see `Spells`.
        records: Its rounds so far.
        drafts: Looked-up drafts that they decided about, see `drafts_of`.
        num_taught: How many of the rounds have taught other requests already.
        blind: The plan of most rounds, which do not follow what would have been looked up; `None` where all do.
    """

    plan: DraftPlan
    outlook: Outlook
    num_rounds: int
    patience_s: float
    debt_s: float
    lookups: frozenset[str | None]
    looked: DepthCounts
    apart: Apart = Apart()
    begins: bool = False
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    drafts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_taught: int = 0
    blind: DraftPlan | None = field(init=False)
    _seen: DepthCounts = field(init=False)  # `looked` after the first so many of `drafts`
    _num_seen: int = field(init=False, default=0)
    _vain_looks: int = field(init=False, default=0)  # at what was looked up, in a row, after which nothing else was planned
    _num_told: int = field(init=False, default=0)  # drafts that said more since the last look
    _follows_at: int = field(init=False, default=0)  # rounds before the next one that follows: sooner where one found a lot

    def again(self, debt_s: float, patience_s: float) -> "Stretch":
        """The same as it began, for another request, which has this debt and patience."""
        return replace(self, debt_s=debt_s, patience_s=patience_s, records=[], drafts=[])

    def __post_init__(self) -> None:
        self.blind, self._seen = self._blind(), self.looked

    @property
    def next_plan(self) -> DraftPlan:
        """Of the coming round."""
        return self.plan if self.blind is None or len(self.records) >= self._follows_at else self.blind

    def stands(self, plan: DraftPlan) -> int:
        """For how many rounds a plan holds."""
        most = min(_TOGETHER, self.num_rounds - len(self.records))
        if self.blind is None:
            return most if plan is self.plan else 1
        return min(most, self._follows_at - len(self.records)) if plan is self.blind else 1

    def is_news(self, record: StepRecord) -> bool:
        """Whether looked-up candidates did so well or badly in a round that others may be planned."""
        return self._num_told >= self._waits and self._says_more(drafts_of(record, self.lookups))

    @property
    def _waits(self) -> int:
        """Rounds that say more and are waited for before the next look: the more, the more looks changed nothing."""
        return 2**self._vain_looks - 1

    def taken(self, records: Sequence[StepRecord]) -> int:
        """How many of these rounds it takes, in order, until it ends."""
        return next((place for place, record in enumerate(records) if not self.takes(record)), len(records))

    def takes(self, record: StepRecord) -> bool:
        """Whether the stretch goes on after a round, which is noted then."""
        records, depth, seconds = self.records, record.depth, self.outlook.seconds
        if len(records) + 1 >= self.num_rounds or record.batch_size > 1 or record.plan.max_depth == 0:
            return False
        if record.drafter not in self.lookups:
            if depth >= len(seconds) or (not depth and record.levels_read):
                return False
            spent_s = self.outlook.whole[1] if record.as_one and self.outlook.whole is not None else seconds[depth]
            debt_s = self.debt_s + spent_s - seconds[0] * (record.num_accepted + 1)
            if debt_s >= self.patience_s:
                return False
            self.debt_s = debt_s if debt_s > 0.0 else 0.0
        records.append(record)
        if record.plan.follows:
            self._follows_at = len(records) - 1 + _FOLLOW_EVERY
        if record.hindsight or record.drafter in self.lookups:
            self._look_at_lookups(record)
        return True

    def _look_at_lookups(self, record: StepRecord) -> None:
        """Plan others if looked-up candidates did so well or badly: texts begin to repeat themselves all at once."""
        drafts, known = drafts_of(record, self.lookups), self.outlook.lookups
        if not drafts or known is None:
            return
        self.drafts += drafts
        if any(taken > 1 for _, taken in drafts):
            self._follows_at = len(self.records)
        if self._says_more(drafts):
            self._num_told += 1
            if self._num_told <= self._waits:
                return
            self._seen = self._seen.seen(self.drafts[self._num_seen :], REQUEST_KEEP)
            self._num_seen = len(self.drafts)
            self.outlook = self.outlook.with_looked(self._seen)
            if (changed := self.outlook.lookup_depth) != self.plan.lookup_depth:
                self.plan, self._vain_looks = replace(self.plan, lookup_depth=changed), 0
            else:
                self._vain_looks = min(self._vain_looks + 1, _MOST_VAIN)
            self.blind, self._num_told = self._blind(), 0

    def _says_more(self, drafts: Sequence[tuple[int, int]]) -> bool:
        depth, known = self.plan.lookup_depth, self.outlook.lookups
        may_grow, may_shrink = known is not None and depth != known.deepest, bool(depth)
        return any((may_grow and taken == examined) or (may_shrink and taken == 0) for examined, taken in drafts)

    def _blind(self) -> DraftPlan | None:
        known = self.outlook.lookups
        waits = known is not None and self.plan.lookup_depth == 0 and not known.are_promising
        return replace(self.plan, follows=False) if waits else None
