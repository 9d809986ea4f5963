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
from monge.core.law import total_variation
from monge.core.proposal import Arbitrary, Deterministic, Proposal
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import TokenTree
from monge.core.verdict import StepRecord, Verdict
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.follow import KnownText, KnownVerdicts, follow
from monge.engine.session import Request, catch

TOLERANCES: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""Largest total variation between a declared draft law and the recomputed one, by type."""


@dataclass(slots=True)
class Redrafter:
    """The target and the drafter of a run, made again; for the tolerance see `TOLERANCES`."""

    components: Components
    tolerance: float

    def redraft(
        self, request: Mapping[str, Any], trees: Sequence[TokenTree], findings: DraftFindings
    ) -> None:
        """Draft every round of a request with these trees again; `findings` receives figures.

        Raises:
            MismatchError: With the first round that these parts do not give again. It is wrong if the
                record cannot be theirs; other candidates alone may come from rounding.
        """
        text = str(request["controller"])
        controller, reason = _controller_of(text)
        findings.plans[text] = reason
        if reason:
            can, members = self.components.drafter.capabilities, self.components.shared.members
            choices = math.inf if can.needs_trees else (can.max_depth + 1) * max(1, len(members))
            findings.choice_bits += len(trees) * math.log2(choices)
        limits = DraftPlan(**request.get("limits", {}))
        tape = _FollowedTape(request, trees, findings, self.tolerance)
        components = replace(
            self.components,
            rule=KnownVerdicts(),
            greedy_rule=None,
            controller=_RecordedPlans(tape, controller),
            controllers={},
            seeded=None,
        )
        recorded = Request(
            prompt_ids=tuple(request["prompt_ids"]),
            max_new_tokens=request["max_new_tokens"],
            rules=SamplingRules(**request["rules"]),
            seed=request["seed"],
            row=request["row"],
            draws=tape,
            limits=limits,
            speculative=text != PLAIN,
        )

        def run() -> None:
            tape.draft_length = components.capabilities.max_length
            follow(Decoder(components).session(recorded), components)

        error = catch(run)
        if tape.error is not None:
            raise tape.error
        if tape.num_verdicts < len(trees):
            reason = f"the drafter cannot be run again: {type(error).__name__}: {error}"
            raise MismatchError("tree", reason, is_wrong=False, place=len(tape.rounds))


def _controller_of(text: str) -> tuple[AnyController | None, str]:
    """Return the controller of this text, or why its plans cannot be made again."""
    try:
        controller = CONTROLLERS.parse(text)
    except MongeError:
        return None, "is not known here"
    seen = sorted(controller.reads - {Reads.ACCEPTED, Reads.TOKENS})
    seen += ["prompts"] * isinstance(controller, PromptReader)
    return (None, f"reads {', '.join(seen)}") if seen else (controller, "")


class _FollowedTape(Tape, KnownText):
    """The draws of a recorded request, which make it go the recorded way.

    Its `error` is the first difference to the record.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        trees: Sequence[TokenTree],
        findings: DraftFindings,
        tolerance: float,
    ) -> None:
        super().__init__(request["seed"], request["row"])
        self._stated, self._trees, self._findings = request["rounds"], trees, findings
        self._tolerance, self._paths = tolerance, list[tuple[int, ...]]()
        self.draft_length: int | None = None
        self.num_verdicts = 0

    def move_to(self, place: int) -> None:
        if len(self.rounds) == len(self._stated):  # after an end of text, a stop or an interruption
            raise MongeError("the record has no more rounds")
        super().move_to(place)
        self._paths = []

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
        if isinstance(proposal, Deterministic):
            return proposal.draw(self)
        stated = {tuple(drawn["path"]): drawn for drawn in self._round["draws"]}.get(path)
        if stated is None:
            self._differ(f"the drafter draws children after {path}, the record does not")
        self._paths.append(path)
        tokens = tuple(stated["tokens"])
        if path in self._declared:
            self.seek(stated["stop"])
            return tokens
        # The law from which they were drawn is known only now.
        self.seek(stated["start"])
        if (proposal.draw(self), self.num_drawn) != (tokens, stated["stop"]):
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
        for name in ("token_ids", "parents", "candidates"):
            new, old = getattr(tree, name), getattr(self._tree, name)
            if new != old:
                self._differ(f"the drafter, made again, gives {name} {new}, the record has {old}")
        for node, (new, old) in enumerate(zip(tree.proposals, self._tree.proposals, strict=True)):
            self._compare(node, new, old)
        paths = [tuple(drawn["path"]) for drawn in self._round["draws"]]
        if self._paths != paths:
            reason = f"the drafter draws children after {self._paths}, the record after {paths}"
            self._differ(reason, is_wrong=True)
        self._findings.num_rounds += 1
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
            self._findings.num_laws += 1
            self._findings.distance = max(self._findings.distance, distance)
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
        self.num_drawn += 1  # or the loop would go on without the drafter
        error = MismatchError(field, reason, is_wrong=is_wrong, place=len(self.rounds))
        self.error = self.error or error
        raise error


@dataclass(frozen=True, slots=True)
class _RecordedPlans(SoloController[Any]):
    """The recorded plans, compared with those of the controller, if it can plan again."""

    followed: _FollowedTape
    controller: AnyController | None

    def init(self, shared: SharedState) -> Any:  # noqa: ANN401 (a controller's state)
        return None if self.controller is None else self.controller.init(shared)

    def plan_one(
        self,
        state: Any,  # noqa: ANN401
        info: RoundInfo,
        context_length: int,
        draws: Draws,
    ) -> DraftPlan:
        if self.controller is None:
            return self.followed.plan(None)
        (right,) = self.controller.plan([state], info, [draws])
        return self.followed.plan(right)

    def update(self, state: Any, record: StepRecord) -> Any:  # noqa: ANN401
        return None if self.controller is None else self.controller.update(state, record)


def _changed(plan: DraftPlan) -> str:
    usual = asdict(DraftPlan())
    return str({key: value for key, value in asdict(plan).items() if value != usual[key]})


def _settings(proposal: Proposal) -> dict[str, Any]:
    """Return the settings of a proposal without its laws."""
    stored = proposal_fields(proposal) or {}
    return {key: value for key, value in stored.items() if key not in {"law", "laws"}}
