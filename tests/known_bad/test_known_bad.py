"""The law tests themselves are tested: every wrong rule and every wrong drafter must be seen."""

from collections.abc import Iterator

import pytest

from monge.api import make_components
from monge.laws.proposal import WithoutReplacement
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.verify.base import Verifier
from tests.kit.known_bad import KNOWN_BAD_LEVELS, KNOWN_BAD_RULES, KNOWN_BAD_TREES

VOCAB = 3
BANK = range(8)
"""Seeds of the target's and the draft model's tables.

A wrong rule may be right on some pairs of laws.
"""


def models(seed: int, vocab: int = VOCAB) -> tuple[TabularModel, TabularModel]:
    return (
        TabularModel(RandomTable(vocab, seed), vocab),
        TabularModel(RandomTable(vocab, 100 + seed), vocab),
    )


def errors(case: Case, vocab: int = VOCAB, **parts: object) -> Iterator[float]:
    for seed in BANK:
        output = output_law(lambda seed=seed: make_components(*models(seed, vocab), **parts), case)  # type: ignore[arg-type]
        yield law_error(output, target_law(models(seed, vocab)[0], case))


ONE_NODE = Case(horizon=1, max_new_tokens=2)


@pytest.mark.parametrize("name", KNOWN_BAD_RULES)
def test_wrong_rules_are_seen(name: str) -> None:
    rule = KNOWN_BAD_RULES[name]
    if isinstance(rule, Verifier):  # its mistake is in the token after an accepted one
        tree, case = "chain(1)", Case(horizon=2, max_new_tokens=2)
    else:
        kind = "without_replacement" if WithoutReplacement in rule.accepts else "iid"
        tree, case = f"fixed_width((2,), {kind!r})", ONE_NODE
    assert any(error > 1e-10 for error in errors(case, tree=tree, verifier=rule))


@pytest.mark.parametrize("name", KNOWN_BAD_TREES)
def test_wrong_drafters_are_seen(name: str) -> None:
    tree = KNOWN_BAD_TREES[name]
    verifier = (
        "recursive_rejection_without_replacement"
        if tree.kind is WithoutReplacement
        else "recursive_rejection"
    )
    assert any(error > 1e-3 for error in errors(ONE_NODE, tree=tree, verifier=verifier))


@pytest.mark.parametrize("name", KNOWN_BAD_LEVELS)
def test_wrong_levels_are_seen_by_rules_for_whole_trees(name: str) -> None:
    """Node by node the same trees are exact: what decides about a draw is known before it."""
    case, tree = Case(horizon=1, max_new_tokens=3), KNOWN_BAD_LEVELS[name]
    assert any(
        error > 1e-3
        for error in errors(case, 2, tree=tree, verifier="layer('recursive_rejection')")
    )
    assert max(errors(case, 2, tree=tree, verifier="recursive_rejection")) < 1e-12


@pytest.mark.parametrize("name", KNOWN_BAD_TREES)
def test_sample_and_match_is_exact_even_for_them(name: str) -> None:
    """It never uses the claimed law, so no claim can bias it."""
    assert max(errors(ONE_NODE, tree=KNOWN_BAD_TREES[name], verifier="sample_and_match")) < 1e-12


@pytest.mark.parametrize(
    ("kind", "verifier"),
    [
        ("iid", "recursive_rejection"),
        ("without_replacement", "recursive_rejection_without_replacement"),
    ],
)
def test_the_right_rules_pass_on_the_same_bank(kind: str, verifier: str) -> None:
    assert max(errors(ONE_NODE, tree=f"fixed_width((2,), {kind!r})", verifier=verifier)) < 1e-12
