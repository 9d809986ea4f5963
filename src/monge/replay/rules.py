"""The rules that can be replayed, and the law of their candidates."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from monge.core.proposal import Deterministic, Proposal
from monge.draft.base import Capabilities
from monge.engine.components import Components
from monge.replay.conditional import (
    Conditional,
    independent_candidates,
    joint_decision,
    same_test,
    scaled_tests,
    sequential_tests,
)
from monge.replay.log import UnavailableError
from monge.verify.base import Rule, Walk, unsupported_reason
from monge.verify.block import Block
from monge.verify.greedy import Greedy
from monge.verify.k_seq import KSeq
from monge.verify.naive_tree import NaiveTree
from monge.verify.optimal import Optimal
from monge.verify.rrs import Rrs
from monge.verify.rrs_without_replacement import RrsWithoutReplacement
from monge.verify.single_draft import SingleDraft
from monge.verify.target_walk import TargetWalk
from monge.verify.traversal import Traversal

CONDITIONAL: Final[Mapping[type[Rule], Callable[..., tuple[int, ...]]]] = MappingProxyType(
    {
        TargetWalk: independent_candidates,
        SingleDraft: sequential_tests,
        Rrs: partial(sequential_tests, tests_fixed=True),
        RrsWithoutReplacement: partial(sequential_tests, drops_repeats=True),
        NaiveTree: partial(sequential_tests, num_tests=1),
        Greedy: partial(sequential_tests, num_tests=1),
        KSeq: same_test,
        Optimal: joint_decision,
        Block: scaled_tests,
        Traversal: scaled_tests,
    }
)
"""By class of the rule: the law of its candidates given the text."""

_WHOLE_PATHS: Final = (Block, Traversal)


def conditional_candidates(rule: Rule, can: Capabilities) -> Conditional:
    """Return the law of candidates given the text.

    Raises:
        UnavailableError: If the log cannot say exactly what the rule would have accepted; the
            message says why.
    """
    rule = rule.rule if isinstance(rule, Walk) else rule
    if can.proposes <= {Deterministic} and not (isinstance(rule, Traversal) and can.max_width != 1):
        # Nothing is drawn, so nothing is tilted: a candidate is accepted iff the text goes on with
        # it.
        return scaled_tests if isinstance(rule, _WHOLE_PATHS) else independent_candidates
    reason = _unavailable_reason(rule, can)
    if reason is not None:
        raise UnavailableError(f"replay: {rule.title} cannot be replayed here: {reason}")
    draw = CONDITIONAL[type(rule)]
    return partial(draw, rule=rule) if isinstance(rule, Optimal) else draw


def with_replayable_rule(components: Components) -> Components:
    """Return the components with a rule that a replay can follow, their own if possible."""
    can = components.drafter.capabilities
    for rule in (components.rule, SingleDraft(), RrsWithoutReplacement(), Rrs()):
        if unsupported_reason(rule, can.proposes, can.max_width) is None:
            with suppress(UnavailableError):
                conditional_candidates(rule, can)
                return components if rule is components.rule else replace(components, rule=rule)
    return components


def stands_in(rule: Rule, proposes: frozenset[type[Proposal]], *, is_compact: bool) -> bool:
    """Return whether rejected candidates have another law than their own, as a compact log lacks it."""
    return is_compact and not isinstance(rule, TargetWalk) and not proposes <= {Deterministic}


def _unavailable_reason(rule: Rule, can: Capabilities) -> str | None:
    if type(rule) not in CONDITIONAL:
        return (
            "the law of its candidates given the text needs target laws off the text, or is not known in "
            f"closed form; replay knows {', '.join(sorted(kind.__name__ for kind in CONDITIONAL))}"
        )
    if isinstance(rule, _WHOLE_PATHS) and can.max_width != 1:
        return "on trees it decides by target laws off the text, which are not logged; replay it on chains"
    return None
