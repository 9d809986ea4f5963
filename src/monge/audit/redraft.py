"""Draft a recorded run again, and compare plans and draft laws with the record.

The real loop runs with the rebuilt parts. Its plans and verdicts are those of the record, and a
node whose children were drawn gets the recorded ones, so that the loop takes the recorded way
whatever the last bits of a law are. A controller whose plans are no function of the text alone, since
it reads measured times, say, would plan otherwise; its plans are taken as recorded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NoReturn

from monge.audit.certificate import PLAIN, proposal_fields, verdict_of
from monge.audit.certify_report import DraftFindings, MismatchError
from monge.audit.checks.coupling import draft_laws
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
from monge.engine.session import Request, Session
from monge.verify.base import Verifier

TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""Largest total variation between a declared draft law and the recomputed one, by type."""


class _EndedError(MongeError):
    """The record cannot be followed any further."""


@dataclass(slots=True)
class Redrafter:
    """The target and the drafter of a run, made again; for the tolerance see `TOLERANCES`."""

    components: Components
    tolerance: float

    def redraft(
        self, request: Mapping[str, Any], trees: Sequence[TokenTree], found: DraftFindings
    ) -> None:
        """Draft every round of a request with these trees again; `found` receives figures.

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
        limits = DraftPlan(**request.get("limits", {}))
        tape = _FollowedTape(request, trees, found, self.tolerance)
        components = replace(
            self.components,
            rule=_RecordedVerdicts(),
            greedy_rule=None,
            controller=_RecordedPlans(tape, controller),
            controllers={},
            seeded=None,
        )
        asked = Request(
            prompt_ids=tuple(request["prompt_ids"]),
            max_new_tokens=request["max_new_tokens"],
            rules=SamplingRules(**request["rules"]),
            seed=request["seed"],
            row=request["row"],
            draws=tape,
            limits=limits,
            speculative=text != PLAIN,
        )

        error: Exception | None = None
        try:
            tape.draft_length = components.capabilities.max_length
            tape.session = Decoder(components).session(asked)
            for session in decode([tape.session], components, max_batch_size=1):
                error = session.error
        except Exception as raised:  # noqa: BLE001  drafters bring code of their own
            error = raised
        if tape.difference is not None:
            raise tape.difference
        if tape.num_verdicts < len(trees):
            reason = f"the drafter cannot be run again: {type(error).__name__}: {error}"
            raise MismatchError("tree", reason, is_wrong=False, place=len(tape.rounds))


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


class _FollowedTape(Tape):
    """The draws of a recorded request, which make it go the recorded way, up to the first `difference`."""

    def __init__(
        self,
        request: Mapping[str, Any],
        trees: Sequence[TokenTree],
        found: DraftFindings,
        tolerance: float,
    ) -> None:
        super().__init__(request["seed"], request["row"])
        self._stated, self._trees, self._found = request["rounds"], trees, found
        self._tolerance, self._asked = tolerance, list[tuple[int, ...]]()
        self.session: Session
        self.draft_length: int | None = None
        self.difference: MismatchError | None = None
        self.num_verdicts = self._num_followed = 0

    @property
    def num_drawn(self) -> int:
        """See `core.draws.num_drawn`; recorded children count as well."""
        return self.place + self._num_followed

    def move_to(self, place: int) -> None:
        if len(self.rounds) == len(self._stated):  # after an end of text, a stop or an interruption
            raise _EndedError("the record has no more rounds")
        super().move_to(place)
        self._asked = []

    @property
    def _round(self) -> Mapping[str, Any]:
        return self._stated[len(self.rounds) - 1]

    @property
    def _tree(self) -> TokenTree:
        return self._trees[len(self.rounds) - 1]

    def plan(self, right: DraftPlan | None) -> DraftPlan:
        """Return the recorded plan, once it is compared with the right one, if that is known."""
        stated = DraftPlan(**self._round["plan"])
        if right is None:
            return stated
        if (limited := self.session.limit(right, self.draft_length)) != stated:
            reason = f"the record has {_changed(stated)}, the controller plans {_changed(limited)}"
            self._differ(reason, is_wrong=True, field="plan")
        return stated

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        self._num_followed += 1
        if isinstance(proposal, Deterministic):
            return proposal.draw(self)
        stated = {tuple(one["path"]): one for one in self._round["draws"]}.get(path)
        if stated is None:
            self._differ(f"the drafter draws children after {path}, the record does not")
        self._asked.append(path)
        tokens = tuple(stated["tokens"])
        if path not in self._declared:
            # The law from which they were drawn is known only now.
            self.seek(stated["start"])
            if (proposal.draw(self), self.place) != (tokens, stated["stop"]):
                self._differ(f"the drafter draws other children after {path} than the record")
        return tokens

    @property
    def _declared(self) -> set[tuple[int, ...]]:
        """Return the nodes whose draws are checked against a law of the record."""
        return {
            self._tree.path_tokens(node)
            for node, proposal in enumerate(self._tree.proposals)
            if not isinstance(proposal, Deterministic | Arbitrary)
        }

    def verdict(self, tree: TokenTree) -> Verdict:
        """Return the recorded verdict, once the tree is compared."""
        own = self._tree
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
        paths = [tuple(one["path"]) for one in self._round["draws"]]
        if self._asked != paths:
            reason = f"the drafter draws children after {self._asked}, the record after {paths}"
            self._differ(reason, is_wrong=True)
        self._found.num_rounds += 1
        self.num_verdicts += 1
        return verdict_of(self._round["verdict"])

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
            place = len(self.rounds)
            self.difference = MismatchError(field, reason, is_wrong=is_wrong, place=place)
        raise _EndedError(reason)


@dataclass(frozen=True, slots=True)
class _RecordedVerdicts(Verifier):
    """The recorded verdicts."""

    accepts = frozenset[type[Proposal]]({Proposal})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        assert isinstance(draws, _FollowedTape)
        return draws.verdict(tree)


@dataclass(frozen=True, slots=True)
class _RecordedPlans(SoloController[Any]):
    """The recorded plans, compared with those of the controller `own`, if it can plan again."""

    followed: _FollowedTape
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


def _changed(plan: DraftPlan) -> str:
    usual = asdict(DraftPlan())
    return str({key: value for key, value in asdict(plan).items() if value != usual[key]})


def _settings(proposal: Proposal) -> dict[str, Any]:
    """Return the settings of a proposal without its laws."""
    stored = proposal_fields(proposal) or {}
    return {key: own for key, own in stored.items() if key not in {"law", "laws"}}
