"""Every verifier on drawn rounds: tree, widths, depth, budget, limits, stop rule, draft law and tables with zeros and ties."""

import re
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monge.cli.listing import PROPOSALS, legality
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.registry import TREES
from monge.laws.proposal import SharedClocks
from monge.verify.layer import FLOW_RULES
from monge.verify.registry import VERIFIERS
from tests.exact.combinations import (
    BUILDERS,
    WAYS,
    Round,
    builder_of,
    round_error,
    rounds,
    shapes,
    verifiers,
)

EXACT = 1e-12
IS_NIGHTLY = settings.default.max_examples >= 1000
NUM_EXAMPLES = 10_000 // len(verifiers()) + 1 if IS_NIGHTLY else 4
TARGET, DRAFT = ((5, 3), (1, 6)), ((2, 3), (4, 1))
FOUND = [
    Round(tree=tree, verifier=verifier, targets=TARGET, drafts=DRAFT, max_nodes=max_nodes)
    for tree, max_nodes in (("paths(3, 2)", 4), ("fixed_width((2, 2), 'iid')", 5))
    for verifier in (
        "layer('recursive_rejection')",
        "layer('k_seq')",
        "layer('optimal_given_candidates')",
    )
]
"""Where the drawn tokens of a level once decided which of its nodes get children."""


@pytest.mark.parametrize("verifier", verifiers())
@settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_text_has_the_law_of_the_target(verifier: str, data: st.DataObject) -> None:
    assert round_error(data.draw(rounds(verifier))) < EXACT


@pytest.mark.parametrize(
    "case", FOUND, ids=lambda case: f"{case.tree} {case.verifier} {case.max_nodes}"
)
def test_a_binding_budget_and_repeated_draws(case: Round) -> None:
    assert round_error(case) < EXACT


CLOCKED = {("gumbel", kind.__name__) for kind in PROPOSALS} | {
    (name, SharedClocks.__name__) for name in VERIFIERS
}
"""Decided by clocks, which have no branches: `tests/verify/test_gumbel.py` integrates them."""


def part_of(text: str) -> str:
    """The name of a part in the package."""
    return text.partition("(")[0].removesuffix("_given_candidates")


def test_whatever_is_called_exact_can_be_drawn() -> None:
    """Every `yes` and `one candidate` of `monge list`, `Arbitrary` candidates included, and every part by name."""
    drawn: set[tuple[str, str]] = set()
    wide: set[tuple[str, str]] = set()
    for verifier in verifiers():
        name = part_of(verifier)
        for shape in (shape for own in shapes(verifier).values() for shape in own):
            limits = builder_of(shape.text).limits
            pairs = {(name, parent.__name__) for kind in limits.proposes for parent in kind.__mro__}
            drawn |= pairs
            wide |= pairs if limits.max_width > 1 else set()
    pairs_of = defaultdict(set)
    for name, kinds in legality().items():
        for kind, word in kinds.items():
            pairs_of[word].add((name, kind))
    assert pairs_of["one candidate"] <= drawn | CLOCKED
    assert pairs_of["yes"] | pairs_of["sample and match"] <= wide | CLOCKED
    assert not drawn & pairs_of["no"]
    assert set(BUILDERS) - {"pruned"} == set(TREES)
    assert {part_of(way) for way in WAYS} == set(CHILDREN) - {"shared"}
    assert {part_of(text) for text in verifiers()} == set(VERIFIERS) - {"gumbel"}
    layers = [text for text in verifiers() if part_of(text) == "layer"]
    inner = {rule for text in layers for rule in re.findall(r"'(.+)'", text)}
    assert {part_of(text) for text in inner} == set(FLOW_RULES)
