"""Chooses the drafter of a pool that begins, by a linear model of the prompt."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from monge.control.acceptance import speeds
from monge.control.base import AnyController, PromptReader, RoundInfo, SharedState
from monge.control.hedge import Hedge, HedgeState, Memories
from monge.core.context import DraftPlan
from monge.core.errors import OptionError, unknown_name
from monge.core.prompt import PromptProfile
from monge.core.selection import Member
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws

_FIRST_LOGIT: Final = 0.5
"""Prediction without data: an acceptance of 0.62."""
_STRETCH: Final = 8
"""Rounds of a request that make an example: their counts are enough for a logit."""
_CODE_MARKS: Final = frozenset("{}()[]<>=;_\\/#*+&|^~`")


def _repeated(token_ids: Sequence[int], size: int) -> float:
    """Return the share of the runs of `size` tokens that occurred before; 0 where there is none."""
    runs = [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]
    return (len(runs) - len(set(runs))) / len(runs) if runs else 0.0


def _share(text: str | None, belongs: Callable[[str], bool]) -> float:
    return sum(map(belongs, text)) / len(text) if text else 0.0


def _nats(value: float | None) -> float:
    # Bounded: a token that the target rules out has a surprisal beyond all bounds.
    return min(2.0, (value or 0.0) / 8.0)


FEATURES: Final[Mapping[str, Callable[[PromptProfile], float]]] = {
    "length": lambda prompt: math.log1p(len(prompt.token_ids)) / 8.0,
    "repeated_pairs": lambda prompt: _repeated(prompt.token_ids, 2),
    "repeated_quadruples": lambda prompt: _repeated(prompt.token_ids, 4),
    "surprisal": lambda prompt: _nats(prompt.surprisal),
    "entropy": lambda prompt: _nats(prompt.entropy),
    "digits": lambda prompt: _share(prompt.text, str.isdigit),
    "code": lambda prompt: _share(prompt.text, _CODE_MARKS.__contains__),
    "foreign": lambda prompt: _share(
        prompt.text, lambda character: character.isalpha() and not character.isascii()
    ),
}
"""Numbers that describe a prompt, each about as large as 1."""
_OF_LAWS: Final = frozenset({"surprisal", "entropy"})
"""Features for which the target's laws of the prompt are read."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """Weighted least squares with a ridge, by recursive updates.

    Args:
        coefficients: The solution so far, `[features]`.
        inverse: Inverse of `ridge * identity + sum of weight * x x'`, `[features][features]`.
    """

    coefficients: tuple[float, ...]
    inverse: tuple[tuple[float, ...], ...]

    @classmethod
    def empty(cls, num_features: int, ridge: float, bias: float = 0.0) -> "Ridge":
        """Return the solution without examples.

        Args:
            num_features: Number of features; the first feature is always 1.
            ridge: Strength of the ridge.
            bias: Prediction where all other features are 0.
        """
        rows = range(num_features)
        identity = tuple(tuple((row == column) / ridge for column in rows) for row in rows)
        return cls(tuple(bias * (row == 0) for row in rows), identity)

    def update(self, features: Sequence[float], value: float, weight: float = 1.0) -> "Ridge":
        """Return the solution with another example (Sherman and Morrison's formula)."""
        spread = self._spread(features)
        scale = 1.0 / (1.0 / weight + _dot(features, spread))
        step = scale * (value - self.predict(features))
        return Ridge(
            tuple(old + step * entry for old, entry in zip(self.coefficients, spread, strict=True)),
            tuple(
                tuple(old - scale * left * right for old, right in zip(row, spread, strict=True))
                for row, left in zip(self.inverse, spread, strict=True)
            ),
        )

    def predict(self, features: Sequence[float]) -> float:
        """Return the fitted value."""
        return _dot(features, self.coefficients)

    def width(self, features: Sequence[float]) -> float:
        """Return the standard width of a prediction: the root of `x' inverse x`."""
        return math.sqrt(max(0.0, _dot(features, self._spread(features))))

    def _spread(self, features: Sequence[float]) -> tuple[float, ...]:
        return tuple(_dot(row, features) for row in self.inverse)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(left, right, strict=True))


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Accepted tokens, rounds with a rejection, and rounds of a drafter in an example."""

    accepted: float = 0.0
    rejected: float = 0.0
    rounds: int = 0

    def update(self, member: Member, record: StepRecord) -> "DraftCounts":
        """Return the counts after a round; after a full example they start anew."""
        if self.rounds >= _STRETCH:
            return DraftCounts().update(member, record)
        if member.max_depth == 0:
            return self
        seen: list[tuple[float, bool]] = []
        if not member.runs_network:
            # Where nothing was found the next token was not foretold: a rejection, or lookups that
            # rarely match would look good.
            drafts = [draft for draft in record.counterfactuals if draft.drafter == member.name]
            seen = [
                (math.fsum(draft.factors), draft.factors[-1:] in {(), (0.0,)}) for draft in drafts
            ]
        elif record.drafter == member.name and record.depth > 0:
            seen = [(record.num_accepted, record.next_kind == "correction")]
        return DraftCounts(
            self.accepted + sum(accepted for accepted, _ in seen),
            self.rejected + sum(rejected for _, rejected in seen),
            self.rounds + len(seen),
        )


LinearMemory = tuple[Memories, Mapping[str, Ridge]]
"""Memory of the later selection, and regressions of the logit of acceptance by drafter."""
_NOTHING: Final[LinearMemory] = {}, {}


@dataclass(frozen=True, slots=True)
class LinearState:
    """State of a request.

    Args:
        hedge: State of the later selection, which learns from the first round on.
        ridges: Regressions by drafter when the request began.
        counts: Counts by drafter.
        features: Features of the prompt, a constant first.
        choice: The drafter that the model chose.
        opening_left: Rounds that it still drafts.
    """

    hedge: HedgeState
    ridges: Mapping[str, Ridge]
    counts: Mapping[str, DraftCounts]
    features: tuple[float, ...] = ()
    choice: str = ""
    opening_left: int = 0


@dataclass(frozen=True, slots=True)
class LinearSelection(PromptReader[LinearState]):
    """Begin with the drafter that is predicted fastest for this prompt, then choose as `hedge` does.

    Of every drafter, a ridge regression predicts the logit of its acceptance from a constant and
    features of the prompt. `bonus` standard widths are added, so that what is unknown is tried. The
    drafter whose best window has the largest predicted tokens per second begins. Every few rounds
    of a request give the regression an example, which later requests use too. Nothing is profiled
    beforehand.

    Args:
        features: Names of features, see `FEATURES`. `surprisal` and `entropy` cost a forward of 32
            nodes a request.
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
    inner: AnyController | str = "on_the_fly"
    opening: int = 4
    bonus: float | int = 0.5
    ridge: float | int = 1.0
    explore: float | int = 0.05
    keep: float | int = 0.98

    reads = Hedge.reads
    selects = True

    def __post_init__(self) -> None:
        check_bounds("linear_selection", opening=self.opening)
        check_bounds("linear_selection", 0, bonus=self.bonus)
        if not self.ridge > 0.0:
            raise OptionError(f"linear_selection: ridge must be larger than 0; got {self.ridge}")
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
        return not _OF_LAWS.isdisjoint(self.features)

    def init(self, shared: SharedState) -> LinearState:
        memories, ridges = shared.memory or _NOTHING
        hedge = self.hedge().init(replace(shared, memory=memories))
        names = hedge.drafters
        return LinearState(hedge, self._ridges(names, ridges), dict.fromkeys(names, DraftCounts()))

    def read(self, state: LinearState, prompt: PromptProfile) -> LinearState:
        features = (1.0, *(FEATURES[name](prompt) for name in self.features))
        fastest = dict[str, float]()
        for name, drafter in state.hedge.drafters.items():
            ridge, seconds = state.ridges[name], drafter.latency.rounds_s(drafter.member.max_depth)
            logit = ridge.predict(features) + self.bonus * ridge.width(features)
            fastest[name] = max(speeds(1.0 / (1.0 + math.exp(-logit)), seconds))
        choice = max(fastest, key=fastest.__getitem__)
        return replace(state, features=features, choice=choice, opening_left=self.opening)

    def prefills_drafter_eagerly(self, shared: SharedState) -> bool:
        return False  # a network that is never chosen need not read prompts

    def plan(
        self, states: Sequence[LinearState], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        hedge = self.hedge()
        names = [
            state.choice if state.opening_left > 0 else hedge.choose(state.hedge, row_draws)
            for state, row_draws in zip(states, draws, strict=True)
        ]
        info = replace(info, memory=(info.memory or _NOTHING)[0])
        return hedge.plans_of([state.hedge for state in states], names, info, draws)

    def update(self, state: LinearState, record: StepRecord) -> LinearState:
        hedge, drafters = self.hedge(), state.hedge.drafters
        probs = dict.fromkeys(drafters, 0.0) | {state.choice: 1.0}
        if state.opening_left == 0:
            probs = hedge.probs(state.hedge)
        return replace(
            state,
            hedge=hedge.after(state.hedge, record, probs),
            opening_left=max(0, state.opening_left - 1),
            counts={
                name: count.update(drafters[name].member, record)
                for name, count in state.counts.items()
            },
        )

    def learn(
        self, memory: LinearMemory | None, state: LinearState, record: StepRecord
    ) -> LinearMemory:
        memories, ridges = memory or _NOTHING
        ridges = {
            name: _with_example(ridge, state.features, state.counts[name])
            for name, ridge in self._ridges(state.counts, ridges).items()
        }
        return self.hedge().learn(memories, state.hedge, record), ridges

    def hedge(self) -> Hedge:
        """Return the selection of later rounds."""
        return Hedge(inner=self.inner, explore=self.explore, keep=self.keep)

    def _ridges(self, names: Iterable[str], learnt: Mapping[str, Ridge]) -> Mapping[str, Ridge]:
        empty = Ridge.empty(len(self.features) + 1, float(self.ridge), _FIRST_LOGIT)
        return {name: learnt.get(name, empty) for name in names}


def _with_example(ridge: Ridge, features: Sequence[float], count: DraftCounts) -> Ridge:
    """Return the regression with another example, if the count is full."""
    if count.rounds < _STRETCH:
        return ridge
    # Half a token of either kind keeps the logit of a clean sweep finite, as Haldane and
    # Anscombe proposed.
    total = count.accepted + count.rejected
    share = (count.accepted + 0.5) / (total + 1.0)
    return ridge.update(features, math.log(share / (1.0 - share)), weight=total / _STRETCH)
