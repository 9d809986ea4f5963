"""Defaults: the drafter, tree, verifier and controllers that fit the user's choices."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from monge.control.base import AnyController
from monge.control.fixed import Fixed
from monge.control.goodput import Goodput
from monge.control.registry import CONTROLLERS
from monge.core.errors import OptionError
from monge.draft.base import AnyDrafter, DrafterPool
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.fixed_width import Chain, FixedWidth
from monge.laws.proposal import Arbitrary, Deterministic, Proposal, WithoutReplacement
from monge.networks.base import SequenceModel
from monge.verify.base import Rule, why_no_exactness
from monge.verify.block import Block
from monge.verify.gumbel import Gumbel
from monge.verify.layer import Layer
from monge.verify.sample_and_match import SampleAndMatch
from monge.verify.traversal import Traversal

ADAPTIVE: Final = "goodput"
"""Default controller of requests whose text need not be reproducible or does not depend on
plans."""
STEADY: Final = "fixed"
"""Default controller of sampled requests with a seed: it reads no measured times."""
SEVERAL: Final = "pool(ngram(min_ngram=2), model)"
"""Default drafters for controllers that select. Repeated text then needs no forward of the draft
model. Matches of one token are too common to be useful."""
_TREES: Final = (
    Chain(),
    *(FixedWidth(children=kind) for kind in CHILDREN if kind != "top"),
    FixedWidth(children="top"),
)
"""Default trees; the first tree that target and verifier support is used. A chain is first because
it loses least if forwards are compute-bound; wider trees pay if a wider forward is nearly free."""
_ADAPTIVE_DEPTH: Final = 8
"""Depth of the default chain if a controller shortens it, and of the drafts of `SEVERAL`."""


@dataclass(frozen=True, slots=True)
class Controllers:
    """The controllers of a decoder.

    Args:
        first: For requests that name no controller.
        named: Controllers that a request may name, by the user's text or that of the object.
        seeded: Name of the controller for sampled requests with a seed that name none; `None` for
            the first.
    """

    first: AnyController
    named: Mapping[str, AnyController] = field(default_factory=dict[str, AnyController])
    seeded: str | None = None

    @property
    def reads(self) -> frozenset[str]:
        """Information about earlier rounds that plans of any of them depend on."""
        return self.first.reads.union(*(controller.reads for controller in self.named.values()))


def controllers_of(controller: object) -> Controllers:
    """Return the controllers that the user gave: an object, its text, or a list of these.

    Raises:
        OptionError: If a name or setting is unknown, one is given twice, none is given, or an object
            is no controller.
    """
    given: Any = controller if isinstance(controller, list | tuple) else [controller]
    names = [entry.strip() if isinstance(entry, str) else repr(entry) for entry in given]
    if not names:
        raise OptionError("controller: the list is empty; name at least one, or leave it out")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise OptionError(f"controller {repeated[0]!r} is given twice; leave one out")
    named = dict(zip(names, map(CONTROLLERS.of, given), strict=True))
    return Controllers(named[names[0]], named)


def default_drafter(
    target: SequenceModel, num_drafts: int, chosen: Controllers | None, rule: Rule | None
) -> str:
    """Return the default drafter.

    Args:
        target: The target.
        num_drafts: Number of draft models.
        chosen: The controllers, if they were named.
        rule: The verifier, if it was named: it may not be exact for looked-up text.
    """
    if num_drafts != 1:
        return "ensemble" if num_drafts else "ngram"
    selects = chosen is None or chosen.first.selects
    takes_model_free = rule is None or why_no_exactness(rule, frozenset({Deterministic}), 1) is None
    return SEVERAL if selects and takes_model_free and _has_room(target) else "model"


def default_controllers(
    rule: Rule, drafter: AnyDrafter, *, is_shortened: bool, is_usual: bool
) -> Controllers:
    """Return the default controllers: `goodput`, and `fixed` if a seed must reproduce its text.

    Args:
        rule: Verifier. If texts do not depend on candidates, they do not depend on plans.
        drafter: The drafter. One that drafts nothing needs no plans.
        is_shortened: Whether `default_tree` chose the tree; it is then deeper than a fixed plan
            should draft.
        is_usual: Whether `default_drafter` chose the drafter: a model-free drafter beside the draft
            model is for controllers that select.
    """
    can = drafter.capabilities
    if can.max_depth == 0:
        return controllers_of(STEADY)
    leaves_out = is_usual and isinstance(drafter, DrafterPool)
    steady = Fixed(
        max_depth=Chain().depth if is_shortened else None,
        model_free_depth=0 if leaves_out else None,
    )
    adaptive = Goodput()
    seeded = None if can.proposes <= rule.invariant_for else STEADY
    return Controllers(adaptive, {ADAPTIVE: adaptive, STEADY: steady}, seeded)


def default_tree(
    rule: Rule | None, target: SequenceModel, own: Sequence[Any], *, is_adaptive: bool
) -> TreeBuilder:
    """Return a tree that fits: the default of the drafters if they agree, else one of the default trees.

    Args:
        rule: Verifier, if it was named.
        target: The target.
        own: Defaults of the drafters.
        is_adaptive: Whether plans shorten it, so that it may be deeper.
    """
    agreed = [
        one
        for one in own[:1]
        if isinstance(one, TreeBuilder) and all(one == other for other in own)
    ]
    deep = (Chain(depth=_ADAPTIVE_DEPTH),) if is_adaptive and _has_room(target) else ()
    for tree in (*agreed, *deep, *_TREES):
        limits = tree.limits
        readable = limits.max_width == 1 or target.why_no_tree is None
        if readable and (
            rule is None or why_no_exactness(rule, limits.proposes, limits.max_width) is None
        ):
            return tree
    return _TREES[0]


def default_rule(proposes: frozenset[type[Proposal]], max_width: int | None) -> Rule:
    """Return the exact verifier that accepts most for candidates drawn in these ways.

    Deterministic candidates use sample and match, which is optimal there. A sampled chain uses the
    optimal rule of a single path, and trees without replacement use `traversal`. Other sampled
    trees use the best known rule of their way of drawing, lifted to the whole tree. Shared clocks
    use the race of these clocks.

    Args:
        proposes: Kinds of proposals that may occur.
        max_width: Most candidates of a node; `None` for unbounded.
    """
    walk = SampleAndMatch()
    if proposes <= {Deterministic, Arbitrary}:
        return walk
    whole_tree = (
        Traversal() if proposes <= {WithoutReplacement, Deterministic, Arbitrary} else Layer()
    )
    rules = (Block(), whole_tree, Gumbel(num_drafts=max_width or 1))
    return next(
        (rule for rule in rules if why_no_exactness(rule, proposes, max_width) is None), walk
    )


def _has_room(target: SequenceModel) -> bool:
    """Return whether drafts of the adaptive depth fit the target's context."""
    return target.max_length is None or target.max_length > _ADAPTIVE_DEPTH
