"""Draft a recorded run again: does the drafter, made anew, declare the same laws?

The real loop runs with the rebuilt drafter. Its plans and verdicts are those of the record, and a
node whose children were drawn gets the recorded ones, so that the loop takes the recorded way
whatever the last bits of a law are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from monge.audit.certificate import Arrays, proposal_fields
from monge.audit.coupling import draft_laws
from monge.control.base import RoundInfo, SharedState, SoloController
from monge.core.child_draws import ChildDraws
from monge.core.context import DraftPlan
from monge.core.draws import ClockDraws, Draws, RequestDraws
from monge.core.errors import MongeError
from monge.core.law import Law, LawSequence, total_variation
from monge.core.proposal import Deterministic, Proposal
from monge.core.sampling_rules import SamplingRules
from monge.core.stopping import StopRule
from monge.core.tree import TokenTree
from monge.core.verdict import StepRecord, Verdict
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.session import Request, Session, catch
from monge.verify.base import Verifier

TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""Largest total variation between a declared draft law and the recomputed one, by type."""


@dataclass(slots=True, kw_only=True)
class DraftFindings:
    """What drafting again gave.

    Attributes:
        num_rounds: Rounds that were drafted again.
        num_laws: Declared draft laws that were recomputed.
        distance: Largest total variation between a declared and a recomputed one.
    """

    num_rounds: int = 0
    num_laws: int = 0
    distance: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rounds": self.num_rounds,
            "laws": self.num_laws,
            "distance": self.distance,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A round that the drafter does not give again.

    Args:
        round: Its number, from 1.
        reason: What differs.
        is_wrong: Whether a declared law is another than the drafter's; other candidates alone may
            come from rounding.
    """

    round: int
    reason: str
    is_wrong: bool


class _EndedError(MongeError):
    """The record cannot be followed any further."""


@dataclass(slots=True)
class Redrafter:
    """The drafter of a run, made again.

    Args:
        components: Target and drafter.
        tolerance: See `TOLERANCES`.
    """

    components: Components
    tolerance: float

    def redraft(
        self, request: Mapping[str, Any], trees: Sequence[TokenTree], found: DraftFindings
    ) -> Iterator[Difference]:
        """Draft every round of a request again.

        Args:
            request: The request's fields.
            trees: Its trees.
            found: Receives figures.

        Yields:
            At most one difference, since the rounds after it start from another state.
        """
        draws = _RecordedDraws(request, trees, found, self.tolerance)
        components = replace(
            self.components,
            rule=_RecordedVerdicts(),
            greedy_rule=None,
            controller=_RecordedPlans(),
            controllers={},
            seeded=None,
        )
        session = Session(
            Request(
                prompt_ids=tuple(request["prompt_ids"]),
                max_new_tokens=request["max_new_tokens"],
                rules=SamplingRules(**request["rules"]),
                seed=request["seed"],
                row=request["row"],
                draws=draws,
            ),
            request_id=0,
        )
        error = catch(lambda: list(decode([session], components, max_batch_size=1)))
        if draws.difference is not None:
            yield draws.difference
        elif (error := error or session.error) is not None and not draws.is_over:
            reason = f"the drafter cannot be run again: {type(error).__name__}: {error}"
            yield Difference(round=draws.place, reason=reason, is_wrong=False)


class _RecordedDraws(ClockDraws, ChildDraws):
    """Draws that know the record of their request."""

    def __init__(
        self,
        request: Mapping[str, Any],
        trees: Sequence[TokenTree],
        found: DraftFindings,
        tolerance: float,
    ) -> None:
        self._own = RequestDraws(request["seed"], request["row"])
        self._rounds, self._trees, self._found = request["rounds"], trees, found
        self._tolerance = tolerance
        self._children: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.difference: Difference | None = None
        self.place, self.is_over = 0, False

    @property
    def plan(self) -> DraftPlan:
        return plan_of(self._rounds[self.place - 1]["plan"])

    def uniform(self) -> float:
        return self._own.uniform()

    def bernoulli(self, prob: float) -> bool:
        return self._own.bernoulli(prob)

    def categorical(self, law: Law) -> int:
        return self._own.categorical(law)

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Tensor:
        return self._own.clocks(depth, draft, num_tokens)

    def move_to(self, place: int) -> None:
        self._own.move_to(place)
        if self.place == len(self._rounds):
            self.is_over = True  # after an end of text, a stop or an interruption
            raise _EndedError("the record has no more rounds")
        drawn = self._rounds[self.place]["draws"]
        self._children = {tuple(one["path"]): tuple(one["tokens"]) for one in drawn}
        self.place += 1

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        if isinstance(proposal, Deterministic):
            return proposal.draw(self)
        if path not in self._children:
            self._differ(f"the drafter draws children after {path}, the record does not")
        return self._children[path]

    def verdict(self, tree: TokenTree) -> Verdict:
        """The recorded verdict, once the tree is compared."""
        own = self._trees[self.place - 1]
        names = ("token_ids", "parents", "candidates")
        different = [name for name in names if getattr(tree, name) != getattr(own, name)]
        if different:
            name = different[0]
            self._differ(
                f"the drafter, made again, gives {name} {getattr(tree, name)}, "
                f"the record has {getattr(own, name)}"
            )
        for node, (new, old) in enumerate(zip(tree.proposals, own.proposals, strict=True)):
            self._compare(node, new, old)
        self._found.num_rounds += 1
        stated = self._rounds[self.place - 1]["verdict"]
        return Verdict(
            path=tuple(stated["path"]),
            next_token=stated["next_token"],
            next_kind=stated["next_kind"],
            examined=tuple(stated["examined"]),
        )

    def _compare(self, node: int, new: Proposal, old: Proposal) -> None:
        if type(new) is not type(old):
            self._differ(
                f"node {node} is declared as {type(old).__name__}, the drafter makes "
                f"{type(new).__name__}",
                is_wrong=True,
            )
        for left, right in zip(draft_laws(new), draft_laws(old), strict=True):
            distance = total_variation(left.sparse(), right.sparse())
            self._found.num_laws += 1
            self._found.distance = max(self._found.distance, distance)
            if distance > self._tolerance:
                self._differ(
                    f"the draft law of node {node} differs from the recomputed one by a total "
                    f"variation of {distance:.2g}",
                    is_wrong=True,
                )
        if _settings(new) != _settings(old):
            self._differ(
                f"node {node} is declared with {_settings(old)}, the drafter has {_settings(new)}"
            )

    def _differ(self, reason: str, *, is_wrong: bool = False) -> None:
        if self.difference is None:
            self.difference = Difference(round=self.place, reason=reason, is_wrong=is_wrong)
        raise _EndedError(reason)


class _RecordedVerdicts(Verifier):
    """The recorded verdicts."""

    accepts = frozenset[type[Proposal]]({Proposal})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        assert isinstance(draws, _RecordedDraws), "draws of the replayed request"
        return draws.verdict(tree)


@dataclass(frozen=True, slots=True)
class _RecordedPlans(SoloController[None]):
    """The recorded plans."""

    def init(self, shared: SharedState) -> None:
        return None

    def plan_one(
        self, state: None, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        assert isinstance(draws, _RecordedDraws), "draws of the replayed request"
        return draws.plan

    def update(self, state: None, record: StepRecord) -> None:
        return None


def plan_of(stored: Mapping[str, Any]) -> DraftPlan:
    """The plan of its fields.

    Raises:
        MongeError: If they make none.
    """
    made = _with_tuples(stored)
    if made["stop"] is not None:
        made["stop"] = StopRule(**_with_tuples(made["stop"]))
    return DraftPlan(**made)


def _with_tuples(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(own) if isinstance(own, list) else own for key, own in stored.items()}


def _settings(proposal: Proposal) -> dict[str, Any]:
    """All of a proposal but its laws."""
    stored = proposal_fields(proposal, Arrays()) or {}
    return {key: own for key, own in stored.items() if key not in {"law", "laws"}}
