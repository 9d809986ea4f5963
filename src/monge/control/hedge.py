"""Chooses the drafter of a pool by the gain that each would have had in the rounds so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import Any, Final

from monge.control.base import (
    AnyController,
    Controller,
    Reads,
    RoundInfo,
    SharedState,
    draw_index,
    latency_of,
)
from monge.control.latency import Latency
from monge.control.registry import DEPTH_CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.selection import CounterfactualDraft, Member
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws

_RATE_KEEP: Final = 0.95
"""Factor on the weight of a round with each later round, in the running speed (the price of a
second)."""
_parse: Final = lru_cache(DEPTH_CONTROLLERS.parse)

Memories = Mapping[str, Any]
"""Memory of the window controller of each drafter, by the drafter's name."""


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
        """The probability of each alternative; at first it is 0 for all but the best alternatives."""
        least = min(self.losses)
        if self.gap <= 0.0:
            masses = [float(loss == least) for loss in self.losses]
        else:
            masses = [math.exp(-self._rate * (loss - least)) for loss in self.losses]
        total = math.fsum(masses)
        return tuple(mass / total for mass in masses)

    def update(self, losses: Sequence[float], keep: float | int = 1.0) -> "AdaHedge":
        """Return the weights after a round; earlier rounds count `keep` times as much as before."""
        weights, least = self.weights, min(losses)
        expected = math.fsum(map(mul, weights, losses))
        if self.gap <= 0.0:
            mixed = min(loss for weight, loss in zip(weights, losses, strict=True) if weight > 0.0)
        else:
            shrunk = (math.exp(-self._rate * (loss - least)) for loss in losses)
            mass = math.fsum(map(mul, weights, shrunk))
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
        """Return the mean with another round."""
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
class DrafterState:
    """The state that a request keeps for a drafter.

    Args:
        member: The drafter.
        latency: Seconds of its rounds.
        windows: State of its window controller.
        average: Mean tokens and seconds of its rounds.
    """

    member: Member
    latency: Latency
    windows: Any
    average: Average = Average()


@dataclass(frozen=True, slots=True)
class HedgeState:
    """State of a request.

    Args:
        drafters: The drafters by name, in the order of the pool.
        weights: Their weights, in the same order.
        pending: Rounds that are not settled, in order.
        recent: Mean tokens and predicted seconds of the last rounds.
    """

    drafters: Mapping[str, DrafterState]
    weights: AdaHedge
    pending: tuple[PendingRound, ...] = ()
    recent: Average = Average()


@dataclass(frozen=True, slots=True)
class Hedge(Controller[HedgeState]):
    """Choose the drafter of each round by the gain that every drafter would have had.

    The gain of a round is its tokens less the price of its predicted seconds, with the running
    speed as the price (and at least that of plain decoding): the drafter of largest gain has the
    most tokens per second, whatever its acceptance. Model-free drafters have *full information*:
    the text decides how many tokens they would have had accepted in each round. Drafters with a
    network have *bandit feedback*: a round that they drafted counts as `m + (gain - m) / P`, with
    their average gain m and the probability P of choosing them, and another round counts as m. This
    is unbiased. A drafter is drawn by its weight, which falls exponentially in the gain that it has
    lost, at AdaHedge's learning rate. `explore` keeps P above zero. Each drafter has its own window
    controller.

    Args:
        inner: The controller that plans how much the chosen drafter drafts, or its text.
        explore: Share of the rounds that is divided among the drafters with a network.
        keep: Factor on the weight of a round with each later round. With 1, the regret bound of
            AdaHedge holds.

    Reference:
        HedgeSpec, arXiv 2510.20064; the weights: de Rooij et al., JMLR 15, 2014. Goodput and bandit
        feedback are our design.
    """

    inner: AnyController | str = "on_the_fly"
    explore: float | int = 0.05
    keep: float | int = 0.98

    reads = frozenset({Reads.ACCEPTED, Reads.TOKENS, Reads.LATENCY, Reads.MEMORY})
    selects = True

    def __post_init__(self) -> None:
        check_bounds("hedge", 0, 1, explore=self.explore, keep=self.keep)
        if self.keep == 0.0:
            raise OptionError("hedge: keep must be larger than 0; got 0")
        DEPTH_CONTROLLERS.of(self.inner)

    def init(self, shared: SharedState) -> HedgeState:
        latency, drafters = latency_of(shared, "hedge"), dict[str, DrafterState]()
        if not shared.members:
            raise OptionError(
                "controller 'hedge' chooses between drafters and there is only one; use "
                "drafter='pool(ngram, model)', or a controller that plans windows"
            )
        memories: Memories = shared.memory or {}
        for member in shared.members:
            view = latency.of(member.name, runs_network=member.runs_network)
            inner = SharedState(view, memories.get(member.name), max_depth=member.max_depth)
            drafters[member.name] = DrafterState(member, view, self._windows().init(inner))
        return HedgeState(drafters, AdaHedge((0.0,) * len(drafters)))

    def prefills_drafter_eagerly(self, shared: SharedState) -> bool:
        return False  # a network that is never chosen need not read prompts

    def plan(
        self, states: Sequence[HedgeState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        return self.plans_of(states, list(map(self.choose, states, draws)), info, draws)

    def update(self, state: HedgeState, record: StepRecord) -> HedgeState:
        return self.after(state, record, self.probs(state))

    def learn(self, memory: Memories | None, state: HedgeState, record: StepRecord) -> Memories:
        memories, name = memory or {}, record.drafter
        if name is None or name not in state.drafters:
            return memories
        learnt = self._windows().learn(memories.get(name), state.drafters[name].windows, record)
        return {**memories, name: learnt}

    def probs(self, state: HedgeState) -> dict[str, float]:
        """Return the probability of every drafter in the coming round."""
        networks = {name for name, drafter in state.drafters.items() if drafter.member.runs_network}
        share = self.explore if networks else 0.0
        return {
            name: (1.0 - share) * weight + (share / len(networks) if name in networks else 0.0)
            for name, weight in zip(state.drafters, state.weights.weights, strict=True)
        }

    def choose(self, state: HedgeState, draws: Draws) -> str:
        """Draw the drafter of the coming round."""
        names, probs = zip(*self.probs(state).items(), strict=True)
        return names[draw_index(probs, draws)]

    def plans_of(
        self,
        states: Sequence[HedgeState],
        names: Sequence[str],
        info: RoundInfo,
        draws: Sequence[Draws],
    ) -> list[DraftPlan]:
        """Return the plans of a batch, given the drafter of each request."""
        plans: dict[int, DraftPlan] = {}
        memories: Memories = info.memory or {}
        for name in dict.fromkeys(names):
            rows = [row for row, other in enumerate(names) if other == name]
            lengths = tuple(info.context_lengths[row] for row in rows)
            group = replace(info, context_lengths=lengths, memory=memories.get(name))
            windows = [states[row].drafters[name].windows for row in rows]
            planned = self._windows().plan(windows, group, [draws[row] for row in rows])
            for row, plan in zip(rows, planned, strict=True):
                plans[row] = replace(plan, drafter=name)
        return [plans[row] for row in range(len(states))]

    def after(
        self, state: HedgeState, record: StepRecord, probs: Mapping[str, float]
    ) -> HedgeState:
        """Return the state after a round whose drafter was chosen with these probabilities."""
        name, recent = record.drafter, state.recent
        if name is None or name not in state.drafters:
            return state  # the drafter has failed, and the request is decoded plainly
        drafter = state.drafters[name]
        speed = recent.tokens / recent.seconds if recent.seconds else 0.0
        price = max(speed, 1.0 / drafter.latency.round_s(0, record.batch_size))
        seconds = drafter.latency.round_s(record.depth, record.batch_size)
        drafter = replace(drafter, windows=self._windows().update(drafter.windows, record))
        state = replace(
            state,
            drafters={**state.drafters, name: drafter},
            pending=(*state.pending, PendingRound(record, probs[name], price)),
            recent=recent.update(record.num_accepted + 1.0, seconds, _RATE_KEEP),
        )
        by_position: dict[int, dict[str, CounterfactualDraft]] = {}
        for draft in record.counterfactuals:
            by_position.setdefault(draft.position, {})[draft.drafter] = draft
        # Without model-free drafters, a round is settled at once.
        waits = not all(drafter.member.runs_network for drafter in state.drafters.values())
        for pending in state.pending:
            drafts = by_position.get(pending.record.context_length)
            if drafts is not None or not waits:
                left = tuple(other for other in state.pending if other is not pending)
                state = replace(self._settled(state, pending, drafts or {}), pending=left)
        return state

    def _windows(self) -> AnyController:
        return _parse(self.inner) if isinstance(self.inner, str) else self.inner

    def _settled(
        self, state: HedgeState, pending: PendingRound, drafts: Mapping[str, CounterfactualDraft]
    ) -> HedgeState:
        """Return the state with the gain of every drafter in a round, or an unbiased estimate of it.

        The price and the averages precede the round, so that the estimate is unbiased given the
        past.
        """
        record, price = pending.record, pending.price
        losses, drafters = list[float](), dict[str, DrafterState]()
        for name, drafter in state.drafters.items():
            average = drafter.average
            gain = average.tokens - price * average.seconds
            if name == record.drafter:
                tokens = record.num_accepted + 1.0
                seconds = drafter.latency.round_s(record.depth, record.batch_size)
                gain += (tokens - price * seconds - gain) / pending.prob
                average = average.update(tokens, seconds, self.keep)
            if name in drafts:
                seconds = drafter.latency.round_s(drafts[name].num_nodes, record.batch_size)
                gain = drafts[name].expected_tokens - price * seconds
            losses.append(-gain)
            drafters[name] = replace(drafter, average=average)
        weights = state.weights.update(losses, self.keep)
        return replace(state, drafters=drafters, weights=weights)
