"""The law tests themselves are tested: every wrong rule and every wrong drafter must be seen."""

import pytest
from monge.api import make_parts
from monge.core.proposal import WithoutReplacement
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.known_bad import KNOWN_BAD_RULES, KNOWN_BAD_TREES
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from monge.verify.registry import VERIFIERS

VOCAB = 4
BANK = range(8)
"""Seeds of the target's and the draft model's tables: a wrong rule may be right on some pairs of laws."""


def models(seed: int) -> tuple[TabularModel, TabularModel]:
    return (
        TabularModel(RandomTable(VOCAB, seed), VOCAB),
        TabularModel(RandomTable(VOCAB, 100 + seed), VOCAB),
    )


def worst_error(case: Case, **parts: object) -> float:
    return max(
        law_error(
            output_law(lambda seed=seed: make_parts(*models(seed), **parts), case),  # type: ignore[arg-type]
            target_law(models(seed)[0], case),
        )
        for seed in BANK
    )


@pytest.mark.parametrize("name", KNOWN_BAD_RULES)
def test_wrong_rules_are_seen(name: str) -> None:
    rule = KNOWN_BAD_RULES[name]
    kind = "without_replacement" if WithoutReplacement in rule.accepts else "iid"
    case = Case(horizon=2, max_new_tokens=3)
    error = worst_error(case, tree=f"fixed_width((2,), {kind!r})", verifier=rule)
    assert error > 1e-10, f"{name}: law error {error}"


@pytest.mark.parametrize("name", KNOWN_BAD_TREES)
def test_wrong_drafters_are_seen(name: str) -> None:
    tree = KNOWN_BAD_TREES[name]
    verifier = "rrs_without_replacement" if tree.kind is WithoutReplacement else "rrs"
    case = Case(horizon=1, max_new_tokens=2)
    error = worst_error(case, tree=tree, verifier=verifier)
    assert error > 1e-3, f"{name}: law error {error}"


@pytest.mark.parametrize("name", KNOWN_BAD_TREES)
def test_the_target_walk_is_exact_even_for_them(name: str) -> None:
    """It never uses the claimed law, so no claim can bias it."""
    case = Case(horizon=1, max_new_tokens=2)
    assert worst_error(case, tree=KNOWN_BAD_TREES[name], verifier="target_walk") < 1e-12


@pytest.mark.parametrize(("kind", "verifier"), [("iid", "rrs"), ("without_replacement", "rrs_without_replacement")])
def test_the_right_rules_pass_on_the_same_bank(kind: str, verifier: str) -> None:
    assert verifier in VERIFIERS
    case = Case(horizon=2, max_new_tokens=3)
    assert worst_error(case, tree=f"fixed_width((2,), {kind!r})", verifier=verifier) < 1e-12
