"""What a round that may draft is expected to bring, and the prices that this puts on its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import Any

from monge.control.base import Memory, costs_of
from monge.control.calibration import Calibration
from monge.control.survival import DepthCounts, expected_tokens
from monge.core.context import DraftPlan
from monge.core.stopping import StopRule
from monge.core.verdict import StepRecord


@dataclass(frozen=True, slots=True)
class Lookups:
    """What rounds with candidates of drafters without a network are expected to bring, by window from 0 on.

    Args:
        tokens: Expected tokens, where something is found.
        seconds: Of the round.
        usual: Acceptance by depth in all requests.
        keep_from_one: Whether the next round cannot run as one if the draft model has to read what was accepted of them.
    """

    tokens: Sequence[float]
    seconds: Sequence[float]
    usual: Sequence[float]
    keep_from_one: bool = False

    @classmethod
    def of(cls, looked: DepthCounts, usual: Sequence[float], seconds: Sequence[float], *, keep_from_one: bool) -> "Lookups":
        """What is expected where a request's acceptance is `looked`, and that of all `usual`."""
        return cls(expected_tokens(looked.acceptance(len(usual), usual)), seconds, usual, keep_from_one)

    @property
    def deepest(self) -> int:
        """The largest window."""
        return len(self.seconds) - 1

    @property
    def are_promising(self) -> bool:
        """Whether most of what is found is expected to be accepted at least in part."""
        return self.tokens[1] > 1.5

    def window(self, price: float, worth: float, after_s: float = 0.0) -> int:
        """The window of largest worth, or 0 where something else is worth more.

        Args:
            price: Tokens that a second is worth.
            worth: Of that else.
            after_s: Seconds that it costs the next round if not all is accepted.
        """
        own = [
            tokens - price * (seconds + after_s * (1.0 - (tokens - before)))
            for before, tokens, seconds in zip(self.tokens, self.tokens[1:], self.seconds[1:], strict=False)
        ]
        best = max(own)
        return own.index(best) + 1 if best > worth else 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a round is expected to bring, by window from 0 on, and the price of a second in tokens.

    Args:
        acceptance: Of a token, given that the one before was accepted, by depth from 1 on.
        tokens: Expected tokens.
        seconds: Of the round, stage by stage.
        verifying: Of all but its drafting.
        price: Tokens that a second is worth.
        whole: Window at which rounds may run as one, and their seconds; `None` where none does.
        lookups: What is expected of a pool's drafters without a network; `None` where there are no others, or none.
        window: The window of largest worth of rounds in stages: tokens less the price of their time.
        as_one: Whether a round that runs as one is worth more.
        worth: That of the better one.
    """

    acceptance: tuple[float, ...]
    tokens: Sequence[float]
    seconds: Sequence[float]
    verifying: Sequence[float]
    price: float
    whole: tuple[int, float] | None
    lookups: Lookups | None
    window: int
    as_one: bool
    worth: float

    @classmethod
    def of(
        cls,
        acceptance: tuple[float, ...],
        tokens: Sequence[float],
        *,
        seconds: Sequence[float],
        verifying: Sequence[float],
        price: float,
        whole: tuple[int, float] | None = None,
        lookups: Lookups | None = None,
    ) -> "Outlook":
        """With the window that follows from the rest, for which it is asked again and again."""
        staged = [one - price * its_seconds for one, its_seconds in zip(tokens, seconds, strict=True)]
        worth = max(staged[1:])
        window, as_one = staged.index(worth, 1), False
        if whole is not None and (own := tokens[whole[0]] - price * whole[1]) >= worth:
            as_one, worth = True, own
        return cls(acceptance, tokens, seconds, verifying, price, whole, lookups, window, as_one, worth)

    @property
    def lookup_depth(self) -> int | None:
        """How deep drafters without a network draft where they find something; see `DraftPlan`."""
        if self.lookups is None:
            return None
        after_s = 0.0
        if self.whole is not None and self.as_one and self.lookups.keep_from_one:
            window, seconds = self.whole
            after_s = max(0.0, self.seconds[window] - seconds)
        return self.lookups.window(self.price, self.worth, after_s)

    def with_looked(self, looked: DepthCounts) -> "Outlook":
        """The same where this is the request's acceptance of looked-up candidates."""
        if (known := self.lookups) is None:
            return self
        lookups = Lookups.of(looked, known.usual, known.seconds, keep_from_one=known.keep_from_one)
        # Spelled out, since it happens every few rounds, and `replace` is slow.
        return Outlook(
            self.acceptance,
            self.tokens,
            self.seconds,
            self.verifying,
            self.price,
            self.whole,
            lookups,
            self.window,
            self.as_one,
            self.worth,
        )

    def shared_lookup_depth(self, depth: int) -> int | None:
        """The same where all drafts of a batch have this depth at most."""
        if self.lookups is None:
            return None
        own = min(depth, len(self.lookups.tokens) - 1)
        return own if self.lookups.tokens[own] > self.tokens[depth] else 0

    @property
    def resting_depth(self) -> int | None:
        """The same while the others rest."""
        return None if self.lookups is None else self.lookups.window(self.price, 1.0 - self.price * self.seconds[0])

    @property
    def speed(self) -> float:
        """Largest expected tokens per second of a round that drafts."""
        staged = max(map(truediv, self.tokens[1:], self.seconds[1:]))
        if self.whole is None:
            return staged
        window, seconds = self.whole
        return max(staged, self.tokens[window] / seconds)

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding."""
        return 1.0 / self.seconds[0]

    @property
    def closeness(self) -> float:
        """Speed of drafting over that of plain decoding, 1 where it pays: how near a thing that is."""
        return min(1.0, self.speed / self.plain_speed)

    def pays(self, margin: float) -> bool:
        """Whether drafting is expected to beat plain decoding by this share of its speed."""
        return self.speed >= self.plain_speed * (1.0 + margin)

    @property
    def loss_s(self) -> float:
        """Seconds by which a round of the best window is expected to be behind plain decoding of its tokens."""
        window, seconds = self.window, self.seconds[self.window]
        if self.whole is not None and self.as_one:
            window, seconds = self.whole
        return max(0.0, seconds - self.tokens[window] * self.seconds[0])


def prices(price: float, seconds: Sequence[float]) -> tuple[float, ...]:
    """Tokens that each level's further seconds are worth."""
    further = [after - before for before, after in zip(seconds, seconds[1:], strict=False)]
    return tuple([price * one if one > 0.0 else 0.0 for one in further])


def stop_rule(outlook: Outlook, calibration: Calibration) -> StopRule:
    """When a draft of stages ends: before a level that is not expected to pay, given the draft network's confidence."""
    return StopRule(
        bias=calibration.bias,
        slope=calibration.slope,
        temperatures=calibration.temperatures,
        draw_prices=prices(outlook.price, outlook.verifying),
        read_prices=prices(outlook.price, outlook.seconds),
        expected=outlook.acceptance,
        following=calibration.following,
    )


def usual_plan(outlook: Outlook, calibration: Calibration, max_window: int) -> DraftPlan:
    """What is planned for rounds that neither try anything nor keep the controller informed."""
    lookup_depth = outlook.lookup_depth
    shared: dict[str, Any] = {"price": outlook.price, "lookup_depth": lookup_depth, "follows": lookup_depth is not None}
    if calibration.num_rounds == 0:
        return DraftPlan(max_depth=outlook.window, stop=StopRule(draw_prices=(0.0,)), **shared)
    if outlook.whole is not None and outlook.as_one:
        return DraftPlan(max_depth=outlook.whole[0], **shared)
    return DraftPlan(max_depth=max_window, stop=stop_rule(outlook, calibration), **shared)


def unstopped(plan: DraftPlan) -> DraftPlan:
    """The plan with prices that stop nothing; the forecasts stay in the record."""
    return plan if plan.stop is None else replace(plan, stop=replace(plan.stop, draw_prices=(0.0,), read_prices=()))


def predicted_seconds(memory: Memory, record: StepRecord) -> float:
    """Predicted seconds of a finished round: the text, not the clock, decides what a request learns."""
    costs = costs_of(memory, "price")
    if record.as_one:
        return costs.round_s(record.depth, record.batch_size, record.context_length)
    reads = 0 if record.drafter in memory.lookups else max(record.depth, record.levels_read)
    drafted = costs.draft_s(reads, record.batch_size) if reads else 0.0
    return costs.verify_s(record.num_nodes, record.batch_size, record.context_length) + drafted


def measured_rounds(memory: Memory, record: StepRecord) -> tuple[float, float]:
    """What a finished round took, in plain rounds of the same batch: by the clock, if the table goes by it too.

    Returns:
        Without and with the reading of text that the drafter had missed: it is read once, and no cost of going on.
    """
    costs, times = costs_of(memory, "price"), record.times
    plain = costs.verify_s(0, record.batch_size, record.context_length)
    if not costs.learns or times.total_s <= 0.0:
        predicted = predicted_seconds(memory, record) / plain
        return predicted, predicted
    reads = record.depth if record.drafter not in memory.lookups else 0
    usual = 1.5 * costs.draft_s(reads, record.batch_size) if reads else 0.0
    return (times.total_s - max(0.0, times.draft_s - usual)) / plain, times.total_s / plain
