"""Chooses the drafter of a pool by the gain that each would have had in the rounds so far."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from monge.control.ada_hedge import AdaHedge
from monge.control.arms import Arms
from monge.control.base import AnyController, Controller, Reads, RoundInfo, SharedState, check_share
from monge.control.windows import WINDOWS
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.selection import CounterfactualDraft
from monge.core.verdict import StepRecord

_RATE_KEEP = 0.95
"""Factor on the weight of a round with each later one, in the running speed (the price of a
second)."""


@dataclass(frozen=True, slots=True)
class Average:
    """Mean tokens and seconds of the rounds of one drafter; old rounds count less."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def update(self, tokens: float, seconds: float, keep: float) -> "Average":
        """The mean with one more round."""
        weight = keep * self.weight + 1.0
        return Average(
            self.tokens + (tokens - self.tokens) / weight,
            self.seconds + (seconds - self.seconds) / weight,
            weight,
        )


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round whose text does not yet decide the gain of the other drafters.

    Args:
        position: Tokens of the text before it.
        batch_size: Requests that shared it.
        chosen: The drafter that was used.
        prob: The probability with which it was chosen.
        price: Goodput of a second when it was planned.
        tokens: Tokens that it verified.
        seconds: Predicted seconds that it took.
    """

    position: int
    batch_size: int
    chosen: int
    prob: float
    price: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class HedgeState:
    """State of one request.

    Args:
        arms: The drafters.
        weights: Their weights.
        inner: States of their window controllers.
        averages: Mean tokens and seconds of each drafter.
        pending: Rounds that are not settled, in order.
        tokens: Tokens of the last rounds; the latest count most.
        seconds: Their predicted seconds.
    """

    arms: Arms
    weights: AdaHedge
    inner: tuple[Any, ...]
    averages: tuple[Average, ...]
    pending: tuple[PendingRound, ...] = ()
    tokens: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hedge(Controller[HedgeState]):
    """Choose the drafter of each round by the gain that every drafter would have had.

    The gain of a round is its tokens less the price of its predicted seconds, with the running
    speed as the price (and at least that of plain decoding): the drafter of largest gain is the one
    of most tokens per second, whatever its acceptance. Model-free drafters have *full information*:
    the text decides how many tokens they would have had accepted in each round. Drafters with a
    network have *bandit feedback*: a round that they drafted counts as `m + (gain - m) / P`, with
    their average gain m and the probability P of choosing them, and another round counts as m. This
    is unbiased. `explore` keeps P above zero. Each drafter has its own window controller.

    Args:
        inner: The controller that plans how much the chosen drafter drafts.
        explore: Share of the rounds that is divided among the drafters with a network.
        keep: Factor on the weight of a round with each later one. With 1, the regret bound of
            AdaHedge holds.

    Reference:
        HedgeSpec, arXiv 2510.20064; the weights: de Rooij et al., JMLR 15, 2014. Goodput and bandit
        feedback are our design.
    """

    inner: str = "on_the_fly"
    explore: float | int = 0.05
    keep: float | int = 0.98

    reads = frozenset({Reads.ACCEPTED, Reads.TOKENS, Reads.LATENCY, Reads.NOTES})
    selects = True

    def __post_init__(self) -> None:
        check_share("hedge", explore=self.explore, keep=self.keep)
        if self.keep == 0.0:
            raise OptionError("hedge: keep must be larger than 0; got 0")
        self.windows()

    def init(self, shared: SharedState) -> HedgeState:
        arms, windows = Arms.of(shared, "hedge"), self.windows()
        count = len(arms.members)
        return HedgeState(
            arms,
            AdaHedge((0.0,) * count),
            tuple(windows.init(own) for own in arms.shared),
            (Average(),) * count,
        )

    def drafts_at_once(self, shared: SharedState) -> bool:
        return False  # a network that is never chosen need not read prompts

    def plan(
        self, states: Sequence[HedgeState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        chosen = [self.choose(state, own) for state, own in zip(states, draws, strict=True)]
        return self.plans_of(states, chosen, info, draws)

    def update(self, state: HedgeState, record: StepRecord) -> HedgeState:
        return self.learn(state, record, self.probs(state))

    def windows(self) -> AnyController:
        """The window controller."""
        return WINDOWS.parse(self.inner)

    def probs(self, state: HedgeState) -> tuple[float, ...]:
        """The probability of every drafter in the coming round."""
        networks = sum(member.runs_network for member in state.arms.members)
        share = self.explore if networks else 0.0
        return tuple(
            (1.0 - share) * weight + (share / networks if member.runs_network else 0.0)
            for weight, member in zip(state.weights.weights, state.arms.members, strict=True)
        )

    def choose(self, state: HedgeState, draws: Draws) -> int:
        """Draw the drafter of the coming round."""
        possible = [(arm, prob) for arm, prob in enumerate(self.probs(state)) if prob > 0.0]
        left = 1.0
        for arm, prob in possible[:-1]:
            if draws.bernoulli(min(1.0, prob / left)):
                return arm
            left -= prob
        return possible[-1][0]

    def plans_of(
        self,
        states: Sequence[HedgeState],
        chosen: Sequence[int],
        info: RoundInfo,
        draws: Sequence[Draws],
    ) -> list[DraftPlan]:
        """Return the plans of a batch; the requests of one drafter are planned together."""
        plans: dict[int, DraftPlan] = {}
        for arm in sorted(set(chosen)):
            rows = [row for row, own in enumerate(chosen) if own == arm]
            own = replace(info, context_lengths=tuple(info.context_lengths[row] for row in rows))
            planned = self.windows().plan(
                [states[row].inner[arm] for row in rows], own, [draws[row] for row in rows]
            )
            for row, plan in zip(rows, planned, strict=True):
                plans[row] = replace(plan, drafter=states[row].arms.names[arm])
        return [plans[row] for row in range(len(states))]

    def learn(self, state: HedgeState, record: StepRecord, probs: Sequence[float]) -> HedgeState:
        """Return the state after a round whose drafter was chosen with these probabilities."""
        if record.drafter not in state.arms.names:
            return state  # the drafter has failed, and the request is decoded plainly
        chosen = state.arms.names.index(record.drafter)
        seconds = state.arms.seconds(chosen, record.depth, record.batch_size)
        tokens = record.num_accepted + 1.0
        inner = list(state.inner)
        inner[chosen] = self.windows().update(inner[chosen], record)
        plain = state.arms.seconds(chosen, 0, record.batch_size)
        price = max(state.tokens / state.seconds if state.seconds else 0.0, 1.0 / plain)
        waiting = PendingRound(
            record.context_length, record.batch_size, chosen, probs[chosen], price, tokens, seconds
        )
        state = replace(
            state,
            inner=tuple(inner),
            pending=(*state.pending, waiting),
            tokens=_RATE_KEEP * state.tokens + tokens,
            seconds=_RATE_KEEP * state.seconds + seconds,
        )
        return self._settled(state, record.counterfactuals)

    def _settled(self, state: HedgeState, entries: Sequence[CounterfactualDraft]) -> HedgeState:
        """Return the state after the rounds that the text has decided."""
        by_position: dict[int, dict[str, CounterfactualDraft]] = {}
        for entry in entries:
            by_position.setdefault(entry.position, {})[entry.drafter] = entry
        waits = any(not member.runs_network for member in state.arms.members)
        for one in state.pending:
            if not waits or one.position in by_position:
                gains = self._gains(state, one, by_position.get(one.position, {}))
                averages = list(state.averages)
                averages[one.chosen] = averages[one.chosen].update(
                    one.tokens, one.seconds, float(self.keep)
                )
                state = replace(
                    state,
                    weights=state.weights.update([-gain for gain in gains], self.keep),
                    averages=tuple(averages),
                    pending=tuple(other for other in state.pending if other is not one),
                )
        return state

    def _gains(
        self, state: HedgeState, one: PendingRound, seen: dict[str, CounterfactualDraft]
    ) -> list[float]:
        """Return the gain of every drafter in a round, or an unbiased estimate of it."""
        # The price and the averages precede the round, so that the estimate is unbiased given the
        # past.
        gains: list[float] = []
        for arm, member in enumerate(state.arms.members):
            if member.name in seen:
                entry = seen[member.name]
                seconds = state.arms.seconds(arm, entry.num_nodes, one.batch_size)
                gains.append(entry.expected_tokens - one.price * seconds)
                continue
            average = state.averages[arm]
            gain = average.tokens - one.price * average.seconds
            if one.chosen == arm:
                gain += (one.tokens - one.price * one.seconds - gain) / one.prob
            gains.append(gain)
        return gains
