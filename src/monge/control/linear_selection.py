"""Which drafter of a pool begins, by a linear model of the prompt.

Later rounds are chosen by what was gained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from monge.control.acceptance import expected_tokens
from monge.control.arms import Arms
from monge.control.base import PromptReader, RoundInfo, SharedState
from monge.control.hedge import Hedge, HedgeState
from monge.control.prompt_features import FEATURES, OF_LAWS
from monge.control.ridge import Ridge
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError, unknown_name
from monge.core.prompt import PromptProfile
from monge.core.verdict import StepRecord

_FIRST_LOGIT: Final = 0.5
"""Where nothing is known: an acceptance of 0.62."""
_STRETCH: Final = 8
"""Rounds of a request that make one example: their counts are enough for a logit."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What was seen of a drafter since its last example.

    Accepted tokens, rounds with a rejection, rounds.
    """

    accepted: float = 0.0
    rejected: float = 0.0
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class LinearState:
    """State of one request.

    Args:
        shared: What the decoder's requests share.
        hedge: State of the later selection, which learns from the first round on.
        features: Of the prompt, a constant first.
        choice: The drafter that the model chose.
        opening_left: Rounds that it still drafts.
        counts: By drafter.
    """

    shared: SharedState
    hedge: HedgeState
    features: tuple[float, ...] = ()
    choice: int = 0
    opening_left: int = 0
    counts: tuple[DraftCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class LinearSelection(PromptReader[LinearState]):
    """Begin with the drafter that is predicted fastest for this prompt, then choose as `hedge` does.

    Of every drafter, a ridge regression predicts the logit of its acceptance from a constant and
    features of the prompt. `bonus` standard widths are added, so that what is unknown is tried. The
    drafter whose best window has the largest predicted tokens per second begins. Every few rounds
    of a request give the regression one example, handed on to later requests; nothing is profiled
    beforehand.

    Args:
        features: Names of features, see `monge.control.prompt_features`. `surprisal` and `entropy`
            cost a forward of 32 nodes a request.
        inner: See `hedge`.
        opening: Rounds that the chosen drafter drafts before the selection by gains takes over.
        bonus: Widths added to a predicted logit.
        ridge: Strength of the ridge.
        explore: See `hedge`.
        keep: See `hedge`.

    Reference:
        Liu, Park and Shen, ACL 2025, paper 482, for acceptance that is linear in prompt features;
        the bonus: LinUCB, Li et al., arXiv 1003.0146. Link, features, recursion and hand-over are
        our design.
    """

    features: tuple[str, ...] = ("length", "repeated_pairs", "repeated_quadruples")
    inner: str = "on_the_fly"
    opening: int = 4
    bonus: float | int = 0.5
    ridge: float | int = 1.0
    explore: float | int = 0.05
    keep: float | int = 0.98

    reads = Hedge.reads
    selects = True

    def __post_init__(self) -> None:
        if self.opening < 1 or not self.bonus >= 0.0 or not self.ridge > 0.0:
            raise OptionError(
                "linear_selection: need opening >= 1, bonus >= 0 and ridge > 0; got "
                f"{self.opening}, {self.bonus}, {self.ridge}"
            )
        for name in self.features:
            if name not in FEATURES:
                raise unknown_name("linear_selection feature", name, FEATURES)
        if len(set(self.features)) < len(self.features):
            raise OptionError(
                "linear_selection: a feature is listed twice: "
                f"{', '.join(self.features)}; list each once"
            )
        self.hedge()

    @property
    def reads_prompt_laws(self) -> bool:
        return not OF_LAWS.isdisjoint(self.features)

    def init(self, shared: SharedState) -> LinearState:
        hedge = self.hedge().init(shared)
        return LinearState(shared, hedge, counts=(DraftCounts(),) * len(hedge.arms.members))

    def read(self, state: LinearState, prompt: PromptProfile) -> LinearState:
        features = (1.0, *(FEATURES[name](prompt) for name in self.features))
        speeds = self.speeds(state, features)
        choice = max(range(len(speeds)), key=speeds.__getitem__)
        return replace(state, features=features, choice=choice, opening_left=self.opening)

    def drafts_at_once(self, shared: SharedState) -> bool:
        return False  # a network that is never chosen need not read prompts

    def plan(
        self, states: Sequence[LinearState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        hedge = self.hedge()
        chosen = [
            state.choice if state.opening_left > 0 else hedge.choose(state.hedge, own)
            for state, own in zip(states, draws, strict=True)
        ]
        return hedge.plans_of([state.hedge for state in states], chosen, info, draws)

    def update(self, state: LinearState, record: StepRecord) -> LinearState:
        hedge, is_opening = self.hedge(), state.opening_left > 0
        certain = [float(arm == state.choice) for arm in range(len(state.counts))]
        following = hedge.learn(
            state.hedge, record, certain if is_opening else hedge.probs(state.hedge)
        )
        counts = tuple(
            self._taught(state, arm, _counted(count, state.hedge.arms, arm, record))
            for arm, count in enumerate(state.counts)
        )
        return replace(
            state, hedge=following, opening_left=max(0, state.opening_left - 1), counts=counts
        )

    def hedge(self) -> Hedge:
        """The selection of later rounds."""
        return Hedge(inner=self.inner, explore=self.explore, keep=self.keep)

    def speeds(self, state: LinearState, features: Sequence[float]) -> tuple[float, ...]:
        """Predicted tokens per second of every drafter at its best window, the bonus included."""
        arms, known = state.hedge.arms, self._known(state)
        speeds: list[float] = []
        for arm, member in enumerate(arms.members):
            score = known[arm].predict(features) + self.bonus * known[arm].width(features)
            tokens = expected_tokens((1.0 / (1.0 + math.exp(-score)),) * member.max_depth)
            seconds = [arms.seconds(arm, window, 1) for window in range(len(tokens))]
            speeds.append(max(count / spent for count, spent in zip(tokens, seconds, strict=True)))
        return tuple(speeds)

    def _known(self, state: LinearState) -> tuple[Ridge, ...]:
        empty = Ridge.empty(len(self.features) + 1, float(self.ridge), _FIRST_LOGIT)
        return state.shared.notes.get("linear_selection", (empty,) * len(state.hedge.arms.members))

    def _taught(self, state: LinearState, arm: int, count: DraftCounts) -> DraftCounts:
        """Make an example of a full count."""
        if count.rounds < _STRETCH:
            return count
        # Half a token of either kind keeps the logit of a clean sweep finite, as Haldane and
        # Anscombe proposed.
        share = (count.accepted + 0.5) / (count.accepted + count.rejected + 1.0)
        known = list(self._known(state))
        known[arm] = known[arm].update(
            state.features,
            math.log(share / (1.0 - share)),
            weight=(count.accepted + count.rejected) / _STRETCH,
        )
        state.shared.notes["linear_selection"] = tuple(known)
        return DraftCounts()


def _counted(count: DraftCounts, arms: Arms, arm: int, record: StepRecord) -> DraftCounts:
    """The count with what a record says about a drafter."""
    member = arms.members[arm]
    if member.max_depth == 0:
        return count
    if member.runs_network:
        drafted = record.drafter == member.name and record.depth > 0
        seen = (
            [(float(record.num_accepted), float(record.next_kind == "correction"))]
            if drafted
            else []
        )
    else:
        # Where nothing was found the next token was not foretold: a rejection, or lookups that
        # rarely match would look good.
        own = [entry.factors for entry in record.counterfactuals if entry.drafter == member.name]
        seen = [(math.fsum(factors), float(not factors or factors[-1] == 0.0)) for factors in own]
    for accepted, rejected in seen:
        count = DraftCounts(count.accepted + accepted, count.rejected + rejected, count.rounds + 1)
    return count
