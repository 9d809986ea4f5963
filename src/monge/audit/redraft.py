"""Draft a recorded run again, and compare plans and draft laws with the record.

The real loop runs with the rebuilt parts. Its plans and verdicts are those of the record, and a
node whose children were drawn gets the recorded ones, so that the loop takes the recorded way
whatever the last bits of a law are. A controller whose plans are no function of the text alone, since
it reads measured times, say, would plan otherwise; its plans are taken as recorded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NoReturn

from monge.audit.certificate import PLAIN, Arrays, proposal_fields
from monge.audit.coupling import draft_laws
from monge.audit.mismatch import MismatchError
from monge.audit.tape import Tape
from monge.control.base import (
    AnyController,
    PromptReader,
    Reads,
    RoundInfo,
    SharedState,
    SoloController,
)
from monge.control.registry import CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import MongeError
from monge.core.law import LawSequence, total_variation
from monge.core.proposal import Arbitrary, Deterministic, Proposal
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import TokenTree
from monge.core.verdict import StepRecord, Verdict
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.session import Request, Session, catch
from monge.verify.base import Verifier

TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""Largest total variation between a declared draft law and the recomputed one, by type."""


@dataclass(slots=True, kw_only=True)
class DraftFindings:
    """Figures of drafting again.

    Attributes:
        num_rounds: Rounds that were drafted again.
        num_laws: Declared draft laws that were recomputed.
        distance: Largest total variation between a declared and a recomputed one.
        plans: By controller, why its plans were taken as recorded; empty where they were made again.
        choice_bits: Binary logarithm of the number of ways in which the plans that were taken as
            recorded could have limited chains; infinite for trees.
    """

    num_rounds: int = 0
    num_laws: int = 0
    distance: float = 0.0
    plans: dict[str, str] = field(default_factory=dict[str, str])
    choice_bits: float = 0.0

    def plan_facts(self) -> list[str]:
        """Return the controllers that planned, and why their plans were not checked."""
        facts = [
            f"plans of {name} as recorded, since it {reason}" if reason else f"planned by {name}"
            for name, reason in self.plans.items()
        ]
        if any(self.plans.values()) and math.isfinite(self.choice_bits):
            facts.append(f"at most {math.ceil(self.choice_bits)} bits of choice in plans")
        return facts or ["nothing drafted"]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "rounds": self.num_rounds,
            "laws": self.num_laws,
            "distance": self.distance,
            "plans": self.plans,
            "choice_bits": self.choice_bits if math.isfinite(self.choice_bits) else None,
        }


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
    ) -> None:
        """Draft every round of a request again.

        Args:
            request: The request's fields.
            trees: Its trees.
            found: Receives figures.

        Raises:
            MismatchError: With the first round that these parts do not give again. It is wrong if the
                record cannot be theirs; other candidates alone may come from rounding.
        """
        text = str(request["controller"])
        controller, reason = _controller_of(text)
        found.plans[text] = reason
        if reason:
            can, members = self.components.drafter.capabilities, self.components.shared.members
            choices = math.inf if can.needs_trees else (can.max_depth + 1) * max(1, len(members))
            found.choice_bits += len(trees) * math.log2(choices)
        limits = plan_of(request["limits"]) if "limits" in request else DraftPlan()
        followed = _FollowedRequest(request, trees, found, self.tolerance)
        components = replace(
            self.components,
            rule=_RecordedVerdicts(followed),
            greedy_rule=None,
            controller=_RecordedPlans(followed, controller),
            controllers={},
            seeded=None,
        )
        asked = Request(
            prompt_ids=tuple(request["prompt_ids"]),
            max_new_tokens=request["max_new_tokens"],
            rules=SamplingRules(**request["rules"]),
            seed=request["seed"],
            row=request["row"],
            draws=followed.tape,
            limits=limits,
            speculative=text != PLAIN,
        )

        def run() -> None:
            followed.draft_length = components.draft_length
            followed.session = Decoder(components).session(asked)
            for session in decode([followed.session], components, max_batch_size=1):
                if session.error is not None:
                    raise session.error

        error = catch(run)
        if followed.difference is not None:
            raise followed.difference
        if followed.num_verdicts < len(trees):
            reason = f"the drafter cannot be run again: {type(error).__name__}: {error}"
            raise MismatchError("tree", reason, is_wrong=False, place=followed.round)


def _controller_of(text: str) -> tuple[AnyController | None, str]:
    """Return the controller of this text, or why its plans cannot be made again."""
    try:
        made = CONTROLLERS.parse(text)
    except MongeError:
        return None, "is not known here"
    # Confidences are rounded, otherwise in a batch than alone.
    seen = sorted(made.reads - {Reads.ACCEPTED, Reads.TOKENS})
    seen += ["prompts"] * isinstance(made, PromptReader)
    return (None, f"reads {', '.join(seen)}") if seen else (made, "")


class _FollowedRequest:
    """The way of a recorded request, compared with what the loop does.

    Attributes:
        tape: The draws of the request.
        session: The request while it is decoded.
        draft_length: Longest text that the drafter reads.
        difference: The first thing that differs.
        round: Number of the round, from 1.
        num_verdicts: Rounds whose tree was compared.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        trees: Sequence[TokenTree],
        found: DraftFindings,
        tolerance: float,
    ) -> None:
        self.tape = Tape(request["seed"], request["row"], follower=self)
        self._rounds, self._trees, self._found = request["rounds"], trees, found
        self._tolerance = tolerance
        self._asked: list[tuple[int, ...]] = []
        self.session: Session
        self.draft_length: int | None = None
        self.difference: MismatchError | None = None
        self.round, self.num_verdicts = 0, 0

    def begin_round(self) -> None:
        if self.round == len(self._rounds):  # after an end of text, a stop or an interruption
            raise _EndedError("the record has no more rounds")
        self._asked = []
        self.round += 1

    @property
    def _children(self) -> dict[tuple[int, ...], Mapping[str, Any]]:
        return {tuple(one["path"]): one for one in self._rounds[self.round - 1]["draws"]}

    def plan(self, right: DraftPlan | None) -> DraftPlan:
        """Return the recorded plan, once it is compared with the right one, if that is known."""
        stated = plan_of(self._rounds[self.round - 1]["plan"])
        if (
            right is not None
            and (limited := self.session.limit(right, self.draft_length)) != stated
        ):
            reason = f"the record has {_changed(stated)}, the controller plans {_changed(limited)}"
            self._differ(reason, is_wrong=True, field="plan")
        return stated

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        if isinstance(proposal, Deterministic):
            return proposal.draw(self.tape)
        stated = self._children.get(path)
        if stated is None:
            self._differ(f"the drafter draws children after {path}, the record does not")
        self._asked.append(path)
        tokens = tuple(stated["tokens"])
        if path not in self._declared:
            # The law from which they were drawn is known only now.
            self.tape.seek(stated["start"])
            if (proposal.draw(self.tape), self.tape.place) != (tokens, stated["stop"]):
                self._differ(f"the drafter draws other children after {path} than the record")
        return tokens

    @property
    def _declared(self) -> set[tuple[int, ...]]:
        """Return the nodes whose draws are checked against a law of the record."""
        tree = self._trees[self.round - 1]
        return {
            tree.path_tokens(node)
            for node, proposal in enumerate(tree.proposals)
            if not isinstance(proposal, Deterministic | Arbitrary)
        }

    def verdict(self, tree: TokenTree) -> Verdict:
        """Return the recorded verdict, once the tree is compared."""
        own = self._trees[self.round - 1]
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
        if self._asked != list(self._children):
            self._differ(
                f"the drafter draws children after {self._asked}, the record after "
                f"{list(self._children)}",
                is_wrong=True,
            )
        self._found.num_rounds += 1
        self.num_verdicts += 1
        stated = self._rounds[self.round - 1]["verdict"]
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

    def _differ(self, reason: str, *, is_wrong: bool = False, field: str = "tree") -> NoReturn:
        if self.difference is None:
            self.difference = MismatchError(field, reason, is_wrong=is_wrong, place=self.round)
        raise _EndedError(reason)


@dataclass(frozen=True, slots=True)
class _RecordedVerdicts(Verifier):
    """The recorded verdicts."""

    followed: _FollowedRequest
    accepts = frozenset[type[Proposal]]({Proposal})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        return self.followed.verdict(tree)


@dataclass(frozen=True, slots=True)
class _RecordedPlans(SoloController[Any]):
    """The recorded plans, compared with those of a controller.

    Args:
        followed: The recorded request.
        own: The controller; `None` where its plans cannot be made again.
    """

    followed: _FollowedRequest
    own: AnyController | None

    def init(self, shared: SharedState) -> Any:  # noqa: ANN401 (the controller's own)
        return None if self.own is None else self.own.init(shared)

    def plan_one(
        self,
        state: Any,  # noqa: ANN401
        info: RoundInfo,
        context_length: int,
        draws: Draws,
    ) -> DraftPlan:
        if self.own is None:
            return self.followed.plan(None)
        (right,) = self.own.plan([state], info, [draws])
        return self.followed.plan(right)

    def update(self, state: Any, record: StepRecord) -> Any:  # noqa: ANN401
        return None if self.own is None else self.own.update(state, record)


def plan_of(stored: Mapping[str, Any]) -> DraftPlan:
    """Return the plan of its fields.

    Raises:
        MongeError: If they make none.
    """
    return DraftPlan(**stored)


def _changed(plan: DraftPlan) -> str:
    usual = asdict(DraftPlan())
    return str({key: value for key, value in asdict(plan).items() if value != usual[key]})


def _settings(proposal: Proposal) -> dict[str, Any]:
    """Return the settings of a proposal without its laws."""
    stored = proposal_fields(proposal, Arrays()) or {}
    return {key: own for key, own in stored.items() if key not in {"law", "laws"}}
