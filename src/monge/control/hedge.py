"""Chooses the drafter of a pool by the gain that each would have had in the rounds so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from monge.control.base import (
    AnyController,
    Controller,
    Reads,
    RoundInfo,
    SharedState,
    latency_of,
)
from monge.control.registry import DEPTH_CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.selection import CounterfactualDraft, Member
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord

_RATE_KEEP: Final = 0.95
"""Factor on the weight of a round with each later one, in the running speed (the price of a
second)."""


@dataclass(frozen=True, slots=True)
class AdaHedge:
    """Exponential weights whose learning rate `ln N / D` follows from their own mixability gap D so far.

    For losses of range S and with `keep` 1 the expected loss exceeds that of the best alternative
    by at most `S (sqrt(T ln N) + 4/3 ln N + 2)` after T rounds, whatever the losses; where one
    alternative is better on average the excess stays bounded. Neither S nor T need be known.

    Args:
        losses: Sums of losses; old rounds count less.
        gap: Sum of the mixability gaps; old rounds count less.

    Reference:
        de Rooij, van Erven, Grünwald and Koolen, "Follow the leader if you can, hedge if you must",
        JMLR 15, 2014, Theorem 8.
    """

    losses: tuple[float, ...]
    gap: float = 0.0

    @property
    def weights(self) -> tuple[float, ...]:
        """The probability of each alternative; at first only the best ones have any."""
        least = min(self.losses)
        if self.gap <= 0.0:
            masses = [1.0 if loss == least else 0.0 for loss in self.losses]
        else:
            masses = [math.exp(-self._rate * (loss - least)) for loss in self.losses]
        total = math.fsum(masses)
        return tuple(mass / total for mass in masses)

    def update(self, losses: Sequence[float], keep: float | int = 1.0) -> "AdaHedge":
        """Return the weights after a round; earlier rounds count `keep` times as much as before."""
        weights, least = self.weights, min(losses)
        expected = math.fsum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        if self.gap <= 0.0:
            mixed = min(loss for weight, loss in zip(weights, losses, strict=True) if weight > 0.0)
        else:
            mass = math.fsum(
                weight * math.exp(-self._rate * (loss - least))
                for weight, loss in zip(weights, losses, strict=True)
            )
            # Weights of alternatives far behind the best one underflow to zero.
            mixed = least - math.log(mass) / self._rate if mass > 0.0 else expected
        sums = tuple(keep * old + new for old, new in zip(self.losses, losses, strict=True))
        return AdaHedge(sums, keep * self.gap + max(0.0, expected - mixed))

    @property
    def _rate(self) -> float:
        return math.log(len(self.losses)) / self.gap


@dataclass(frozen=True, slots=True)
class Average:
    """Mean tokens and seconds of rounds; old rounds count less."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def update(self, tokens: float, seconds: float, keep: float) -> "Average":
        """Return the mean with one more round."""
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
        record: Record of the round.
        prob: The probability with which its drafter was chosen.
        price: Goodput of a second when it was planned.
    """

    record: StepRecord
    prob: float
    price: float


@dataclass(frozen=True, slots=True)
class HedgeState:
    """State of one request.

    Args:
        members: The drafters.
        shared: Shared state of each drafter's window controller, with the latency of its rounds.
        weights: Weights of the drafters.
        inner: States of their window controllers.
        averages: Mean tokens and seconds of each drafter.
        pending: Rounds that are not settled, in order.
        recent: Mean tokens and predicted seconds of the last rounds.
    """

    members: tuple[Member, ...]
    shared: tuple[SharedState, ...]
    weights: AdaHedge
    inner: tuple[Any, ...]
    averages: tuple[Average, ...]
    pending: tuple[PendingRound, ...] = ()
    recent: Average = Average()

    def arm(self, drafter: str | None) -> int | None:
        """Return the index of a drafter, or `None` if there is no such one."""
        names = [member.name for member in self.members]
        return names.index(drafter) if drafter in names else None

    def seconds(self, arm: int, depth: int, batch_size: int) -> float:
        """Return the predicted seconds of a round that one drafter drafts."""
        return latency_of(self.shared[arm], self.members[arm].name).round_s(depth, batch_size)


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
        check_bounds("hedge", 0, 1, explore=self.explore, keep=self.keep)
        if self.keep == 0.0:
            raise OptionError("hedge: keep must be larger than 0; got 0")
        self._windows()

    def init(self, shared: SharedState) -> HedgeState:
        latency, members = latency_of(shared, "hedge"), shared.members
        if not members:
            raise OptionError(
                "controller 'hedge' chooses between drafters and there is only one; use "
                "drafter=\"pool('ngram', 'model')\", or a controller that plans windows"
            )
        if "hedge" not in shared.notes:
            shared.notes["hedge"] = tuple(
                SharedState(
                    latency.of(member.name, runs_network=member.runs_network),
                    max_depth=member.max_depth,
                )
                for member in members
            )
        arms: tuple[SharedState, ...] = shared.notes["hedge"]
        inner, weights = tuple(map(self._windows().init, arms)), AdaHedge((0.0,) * len(members))
        return HedgeState(members, arms, weights, inner, (Average(),) * len(members))

    def drafts_at_once(self, shared: SharedState) -> bool:
        return False  # a network that is never chosen need not read prompts

    def plan(
        self, states: Sequence[HedgeState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        chosen = [
            self.choose(state, row_draws) for state, row_draws in zip(states, draws, strict=True)
        ]
        return self.plans_of(states, chosen, info, draws)

    def update(self, state: HedgeState, record: StepRecord) -> HedgeState:
        return self.learn(state, record, self.probs(state))

    def probs(self, state: HedgeState) -> tuple[float, ...]:
        """Return the probability of every drafter in the coming round."""
        networks = sum(member.runs_network for member in state.members)
        share = self.explore if networks else 0.0
        return tuple(
            (1.0 - share) * weight + (share / networks if member.runs_network else 0.0)
            for weight, member in zip(state.weights.weights, state.members, strict=True)
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
            rows = [row for row, choice in enumerate(chosen) if choice == arm]
            group = replace(info, context_lengths=tuple(info.context_lengths[row] for row in rows))
            planned = self._windows().plan(
                [states[row].inner[arm] for row in rows], group, [draws[row] for row in rows]
            )
            for row, plan in zip(rows, planned, strict=True):
                plans[row] = replace(plan, drafter=states[row].members[arm].name)
        return [plans[row] for row in range(len(states))]

    def learn(self, state: HedgeState, record: StepRecord, probs: Sequence[float]) -> HedgeState:
        """Return the state after a round whose drafter was chosen with these probabilities."""
        chosen, recent = state.arm(record.drafter), state.recent
        if chosen is None:
            return state  # the drafter has failed, and the request is decoded plainly
        inner = list(state.inner)
        inner[chosen] = self._windows().update(inner[chosen], record)
        speed = recent.tokens / recent.seconds if recent.seconds else 0.0
        price = max(speed, 1.0 / state.seconds(chosen, 0, record.batch_size))
        seconds = state.seconds(chosen, record.depth, record.batch_size)
        state = replace(
            state,
            inner=tuple(inner),
            pending=(*state.pending, PendingRound(record, probs[chosen], price)),
            recent=recent.update(record.num_accepted + 1.0, seconds, _RATE_KEEP),
        )
        return self._settled(state, record.counterfactuals)

    def _windows(self) -> AnyController:
        return DEPTH_CONTROLLERS.parse(self.inner)

    def _settled(self, state: HedgeState, entries: Sequence[CounterfactualDraft]) -> HedgeState:
        """Return the state after the rounds that the text has decided."""
        by_position: dict[int, dict[str, CounterfactualDraft]] = {}
        for entry in entries:
            by_position.setdefault(entry.position, {})[entry.drafter] = entry
        waits = any(not member.runs_network for member in state.members)
        for pending in state.pending:
            seen = by_position.get(pending.record.context_length)
            if seen is not None or not waits:
                left = tuple(other for other in state.pending if other is not pending)
                state = replace(self._after(state, pending, seen or {}), pending=left)
        return state

    def _after(
        self, state: HedgeState, pending: PendingRound, seen: Mapping[str, CounterfactualDraft]
    ) -> HedgeState:
        """Return the state with the gain of every drafter in a round, or an unbiased estimate of it.

        The price and the averages precede the round, so that the estimate is unbiased given the
        past.
        """
        record, losses, averages = pending.record, list[float](), list(state.averages)
        for arm, (member, average) in enumerate(zip(state.members, state.averages, strict=True)):
            gain = average.tokens - pending.price * average.seconds
            if member.name == record.drafter:
                tokens = record.num_accepted + 1.0
                seconds = state.seconds(arm, record.depth, record.batch_size)
                gain += (tokens - pending.price * seconds - gain) / pending.prob
                averages[arm] = average.update(tokens, seconds, self.keep)
            if member.name in seen:
                entry = seen[member.name]
                seconds = state.seconds(arm, entry.num_nodes, record.batch_size)
                gain = entry.expected_tokens - pending.price * seconds
            losses.append(-gain)
        return replace(
            state, weights=state.weights.update(losses, self.keep), averages=tuple(averages)
        )
