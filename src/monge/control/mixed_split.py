"""Chooses how many candidates of a node are its top tokens, from the acceptance so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monge.control.base import AnyController, Controller, Reads, RoundInfo, SharedState, check_share
from monge.control.windows import WINDOWS
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.verdict import StepRecord

_NAME = "mixed_split"
_SHARED_WEIGHT = 16.0  # nodes of this request that what others had accepted counts for
_FIRST_ACCEPTANCE = 0.75


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes that were stood on, and how many of them had a candidate accepted.

    Old ones count less.
    """

    nodes: float = 0.0
    accepted: float = 0.0

    def aged(self, keep: float) -> "NodeCounts":
        """The same share as weaker evidence."""
        return NodeCounts(keep * self.nodes, keep * self.accepted)

    def plus(self, is_accepted: bool) -> "NodeCounts":
        """With one more node."""
        return NodeCounts(self.nodes + 1.0, self.accepted + float(is_accepted))

    def share(self, prior: float, weight: float) -> float:
        """Share of accepted nodes, shrunk towards `prior`, which counts for `weight` nodes."""
        return (self.accepted + weight * prior) / (self.nodes + weight)


Counts = Mapping[int, tuple[NodeCounts, ...]]
"""By width of the node, a count for every number of top tokens from 0 on."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """State of one request.

    Args:
        shared: What the decoder's requests share.
        inner: State of the window controller.
        num_fixed: The split of the next round's nodes, by width from 1 on.
        counts: Nodes of this request.
    """

    shared: SharedState
    inner: Any
    num_fixed: tuple[int, ...]
    counts: Counts = field(default_factory=dict[int, tuple[NodeCounts, ...]])


@dataclass(frozen=True, slots=True)
class MixedSplit(Controller[SplitState]):
    """Choose how many candidates of a node are its top tokens, and how many are drawn, by the acceptance of either so far.

    Each split of a node's width into top tokens and draws is an arm of a bandit, widths apart. Its
    estimate is the share of the nodes stood on that had a candidate accepted, in this request,
    shrunk towards that of all requests before it, where old nodes count less. The arm of largest
    estimate plus `explore * sqrt(log(nodes of this width) / nodes of the arm)` is chosen. Only
    finished rounds are looked at, so every verifier stays exact.

    Args:
        inner: The controller that plans how much is drafted.
        max_width: Widest node with arms of its own; wider ones follow it.
        explore: Weight of the bonus of arms that were seldom chosen.
        keep: Weight that a node keeps with every later one in what requests share.

    Reference:
        Garivier and Moulines, *On upper-confidence bound policies for switching bandits*, ALT 2011
        (discounted UCB). Candidates of both kinds: our design.
    """

    inner: str = "fixed"
    max_width: int = 8
    explore: float | int = 0.1
    keep: float | int = 0.998

    reads: frozenset[Reads] = field(init=False, repr=False, compare=False)

    plans_splits = True

    def __post_init__(self) -> None:
        check_share(_NAME, keep=self.keep)
        if (
            self.max_width < 1
            or not (math.isfinite(self.explore) and self.explore >= 0.0)
            or self.keep == 0.0
        ):
            raise OptionError(
                f"{_NAME}: need max_width >= 1, explore >= 0 and keep > 0; got {self.max_width}, "
                f"{self.explore}, {self.keep}"
            )
        object.__setattr__(self, "reads", self.windows().reads | {Reads.ACCEPTED, Reads.NOTES})

    def init(self, shared: SharedState) -> SplitState:
        widths = range(1, self.max_width + 1)
        return SplitState(
            shared,
            self.windows().init(shared),
            tuple(self._best({}, _shared_counts(shared), width) for width in widths),
        )

    def drafts_at_once(self, shared: SharedState) -> bool:
        return self.windows().drafts_at_once(shared)

    def plan(
        self, states: Sequence[SplitState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        plans = self.windows().plan([state.inner for state in states], info, draws)
        return [
            replace(plan, num_fixed=state.num_fixed)
            for plan, state in zip(plans, states, strict=True)
        ]

    def update(self, state: SplitState, record: StepRecord) -> SplitState:
        shared_counts, own, best = (
            dict(_shared_counts(state.shared)),
            dict(state.counts),
            list(state.num_fixed),
        )
        for place, (width, num_fixed) in enumerate(record.splits):
            if width > 1:
                is_accepted = place < record.num_accepted
                shared_counts[width] = _counted(
                    shared_counts, width, num_fixed, is_accepted, float(self.keep)
                )
                own[width] = _counted(own, width, num_fixed, is_accepted, 1.0)
        for width in {width for width, _ in record.splits if 1 < width <= self.max_width}:
            best[width - 1] = self._best(own, shared_counts, width)
        state.shared.notes[_NAME] = shared_counts
        return SplitState(
            state.shared, self.windows().update(state.inner, record), tuple(best), own
        )

    def windows(self) -> AnyController:
        """The controller that plans how much is drafted."""
        return WINDOWS.parse(self.inner)

    def _best(self, own: Counts, shared_counts: Counts, width: int) -> int:
        theirs, ours = (
            shared_counts.get(width, (_NOTHING,) * width),
            own.get(width, (_NOTHING,) * width),
        )
        trials = math.log1p(sum(seen.nodes for seen in theirs))
        worths = [
            mine.share(seen.share(_FIRST_ACCEPTANCE, 1.0), _SHARED_WEIGHT)
            + self.explore * math.sqrt(trials / (seen.nodes + 1.0))
            for seen, mine in zip(theirs, ours, strict=True)
        ]
        return worths.index(max(worths))


_NOTHING = NodeCounts()


def _shared_counts(shared: SharedState) -> Counts:
    return shared.notes.get(_NAME, {})


def _counted(
    counts: Counts, width: int, num_fixed: int, is_accepted: bool, keep: float
) -> tuple[NodeCounts, ...]:
    """The counts of nodes so wide with one node more."""
    aged = [seen.aged(keep) for seen in counts.get(width, (_NOTHING,) * width)]
    aged[num_fixed] = aged[num_fixed].plus(is_accepted)
    return tuple(aged)
