"""The components that a round is made of."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch

from monge.control.base import AnyController, Reads, SharedState
from monge.core.errors import (
    OptionError,
    ProposalMismatchError,
    UnsupportedModelError,
    VocabularyMismatchError,
    unknown_name,
)
from monge.core.sampling_rules import SamplingRules
from monge.core.selection import CounterfactualDraft
from monge.draft.base import AnyDrafter, Capabilities, DrafterPool
from monge.laws.proposal import Deterministic
from monge.networks.base import PreparedModel, Recorder, SequenceModel, draft_length, dtype_of
from monge.networks.forward import CopyingModel
from monge.runtime.process import round_lock
from monge.verify.base import Rule, Verifier, as_verifier, why_no_exactness

_FLOAT32_BYTES: Final = 4
_MOST_NODES: Final = 63
"""Nodes of a drafted tree for which the target is prepared, if the drafter does not tell."""
_LEVEL: Final = 16
"""Nodes of a level of a drafted tree for which draft models are prepared."""
# A plan that depends on these may differ when its seed comes again.
_UNSTEADY: Final = frozenset({Reads.LATENCY, Reads.MEMORY})


@dataclass(frozen=True, kw_only=True)
class Components:
    """Target, drafter, verifier and controller, checked against each other.

    Args:
        target: The model whose distribution is preserved.
        drafter: Where candidates come from.
        rule: Node rule or verifier.
        controller: How much to draft.
        greedy_rule: A cheaper rule for greedy requests, used where it is exact for the drafter's
            proposals; `None` for `rule`.
        controllers: Those that a request may name, `controller` among them if it has a name.
        seeded: Which of them plans for sampled requests that bring a seed and name none; `None` for
            `controller`.
        draft_models: Networks that the drafter runs, for the accounting of forward times.
        alternatives: Gives verifiers by name, to be named where `rule` does not fit the drafter.
        shared: What controllers keep beyond a request; the only component that changes.
        lock: Held during a round, so that threads which share a decoder take turns.

    Raises:
        OptionError: If a controller says that it reads something unknown.
        ProposalMismatchError: If the verifier is not exact for what the drafter proposes.
        UnsupportedModelError: If the target cannot read what the drafter proposes.
        VocabularyMismatchError: If a draft model has another vocabulary size.
    """

    target: SequenceModel
    drafter: AnyDrafter
    rule: Rule
    controller: AnyController
    greedy_rule: Rule | None = None
    draft_models: tuple[SequenceModel, ...] = ()
    alternatives: Callable[[], Iterable[tuple[str, Rule]]] = tuple
    shared: SharedState = field(default_factory=SharedState)
    controllers: Mapping[str, AnyController] = field(default_factory=dict[str, AnyController])
    seeded: str | None = None
    lock: AbstractContextManager[Any] = field(default_factory=round_lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        can = self.capabilities
        reason = why_no_exactness(self.rule, can.proposes, can.max_width)
        if reason is not None:
            legal = [
                n
                for n, rule in self.alternatives()
                if why_no_exactness(rule, can.proposes, can.max_width) is None
            ]
            use = f"; legal here: {', '.join(legal)}" if legal else ""
            raise ProposalMismatchError(f"{reason}{use}")
        if can.max_depth > 0 and self.target.why_no_draft is not None:
            raise UnsupportedModelError(
                f"speculation is not possible: {self.target.why_no_draft}; use drafter='none'"
            )
        if can.needs_trees and self.target.why_no_tree is not None:
            raise UnsupportedModelError(
                f"trees are not possible: {self.target.why_no_tree}; use tree='chain'"
            )
        for controller in (self.controller, *self.controllers.values()):
            for name in controller.reads - frozenset(Reads):
                raise unknown_name(f"value of {type(controller).__name__}.reads:", name, Reads)
        if self.target.max_length is not None and can.max_depth >= self.target.max_length:
            raise OptionError(
                f"draft depth {can.max_depth} does not fit the target's context of "
                f"{self.target.max_length} tokens"
            )
        for model in self.draft_models:
            if model.vocab_size != self.target.vocab_size:
                raise VocabularyMismatchError(
                    f"the draft model has {model.vocab_size} tokens, the target "
                    f"{self.target.vocab_size}; a draft model must "
                    "share the target's tokenizer and vocabulary"
                )

    @cached_property
    def capabilities(self) -> Capabilities:
        """Capabilities of the drafter for this target, which may take long to tell."""
        can = self.drafter.capabilities
        bounds = [
            bound for bound in (can.max_length, draft_length(self.target)) if bound is not None
        ]
        return replace(can, max_length=min(bounds, default=None))

    @property
    def verifier(self) -> Verifier:
        """The whole-tree form of the rule."""
        return as_verifier(self.rule)

    @cached_property
    def greedy_verifier(self) -> Verifier:
        """The verifier of greedy requests.

        If the target's distributions are point masses, all lossless rules give the same text, and
        none accepts more than sample and match.
        """
        rule, can = self.greedy_rule, self.capabilities
        fits = (
            rule is not None
            and self.rule.is_lossless
            and why_no_exactness(rule, can.proposes, can.max_width) is None
        )
        return as_verifier(rule if rule is not None and fits else self.rule)

    @cached_property
    def takes_forced(self) -> bool:
        """True if a chain of deterministic candidates may stand in for a draft of the drafter."""
        is_exact = why_no_exactness(self.rule, {Deterministic}, 1) is None
        return is_exact and self.target.why_no_draft is None

    @property
    def reads(self) -> frozenset[Reads]:
        """Information that the plans of any of the controllers may depend on."""
        controllers = (self.controller, *self.controllers.values())
        return frozenset(Reads(name) for controller in controllers for name in controller.reads)

    @property
    def controller_name(self) -> str:
        """Name of the controller of requests that name none."""
        named = (
            name for name, controller in self.controllers.items() if controller is self.controller
        )
        return next(named, type(self.controller).__name__)

    def controller_name_for(
        self, name: str | None, rules: SamplingRules, *, is_seeded: bool
    ) -> str | None:
        """Name of the controller of a request; `None` for the default controller.

        Args:
            name: The controller that the request names, if any.
            rules: Its sampling rules: greedy texts are the same under all plans.
            is_seeded: Whether it has a seed, which must give its text again.
        """
        return self.seeded if name is None and is_seeded and rules.temperature > 0 else name

    @property
    def coarse_dtype(self) -> torch.dtype | None:
        """The type of fewer than 32 bits in which a network computes, or `None`.

        Sums of different batch shapes are rounded differently. In float32 that changes next to no
        text; in bfloat16 and float16 a text alone and the same text in a batch soon differ, so that
        a seed names no text.
        """
        dtypes = (dtype_of(model) for model in (self.target, *self.draft_models))
        return next(
            (dtype for dtype in dtypes if dtype is not None and dtype.itemsize < _FLOAT32_BYTES),
            None,
        )

    def repeats(self, name: str | None, rules: SamplingRules, *, is_planned: bool = True) -> bool:
        """Return whether a seed gives a text again, alone or in a batch.

        No network may compute in a `coarse_dtype`. The controller must read neither measured times
        nor other requests, and the drafter no other texts, unless drafts do not matter.

        Args:
            name: Name of the controller; `None` for the default controller.
            rules: The request's sampling rules.
            is_planned: Whether a controller plans for the request at all.
        """
        if self.coarse_dtype is not None:
            return False
        plans_repeat = not is_planned or self.controller_for(name).reads.isdisjoint(_UNSTEADY)
        return (
            (plans_repeat and not self.capabilities.reads_others)
            or rules.temperature == 0
            or self.capabilities.proposes <= self.rule.invariant_for
        )

    def controller_for(self, name: str | None) -> AnyController:
        """Return the controller of a request.

        Args:
            name: The controller that the request names; `None` for the default controller.

        Raises:
            OptionError: If no controller has this name.
        """
        if name is not None and name not in self.controllers:
            raise unknown_name("controller", name, self.controllers)
        return self.controller if name is None else self.controllers[name]

    def shared_for(self, name: str | None) -> SharedState:
        """Return what a controller keeps beyond a request, by the name as in `controller_for`."""
        is_usual = self.controller_for(name) is self.controller
        return self.shared if name is None or is_usual else self.shared.beside(name)

    def counterfactuals(self, drafter_state: Any) -> tuple[CounterfactualDraft, ...]:
        """Return the results of shadow drafts of a pool in earlier rounds of a request.

        Nothing without a pool, or without state.
        """
        if isinstance(self.drafter, DrafterPool) and drafter_state is not None:
            return self.drafter.counterfactuals(drafter_state)
        return ()

    @property
    def copying_models(self) -> tuple[CopyingModel, ...]:
        """The networks that may be run with copies of their weights."""
        inner = (getattr(model, "resized", model) for model in (self.target, *self.draft_models))
        return tuple(model for model in inner if isinstance(model, CopyingModel))

    def update_weights(self) -> None:
        """Let all networks follow weights that were changed; see `CopyingModel`."""
        for model in self.copying_models:
            model.update_weights()

    def runs_network(self, name: str | None) -> bool:
        """Return whether a drafter runs a network, by its name in the pool; without a pool, `True`."""
        members = self.shared.members
        return not members or any(member.runs_network and member.name == name for member in members)

    def prepare(self, max_batch_size: int) -> None:
        """Let the networks capture their forwards for rounds of up to `max_batch_size` requests."""
        can = self.capabilities
        most = _MOST_NODES if can.max_nodes is None else can.max_nodes
        # A draft model reads a level at a time; two tokens where all drafts were accepted, and one
        # more for each plain round before.
        level = min(most, _LEVEL) if can.needs_trees else 3
        for model in (self.target, *self.draft_models):
            if isinstance(model, PreparedModel):
                drafts = model is not self.target
                model.prepare(max_batch_size, level if drafts else 1 + most, drafts=drafts)

    @property
    def record(self) -> Recorder | None:
        """Runs functions of the target's logits, if its backend records them."""
        return getattr(self.target, "record", None)

    @property
    def forward_s(self) -> float:
        """Seconds spent so far inside the forwards of all networks."""
        return self.target.forward_s + sum(model.forward_s for model in self.draft_models)
