"""Draft laws cut to their most probable tokens and declared as such, in the real loop."""

from functools import partial

import pytest

from monge.api import make_components
from monge.core.errors import MongeError
from monge.core.sampling_rules import SamplingRules
from monge.oracle.decoding import Case
from monge.oracle.tabular import TabularModel
from tests.kit.known_bad import KNOWN_BAD_TREES
from tests.kit.tables import loop_error, table

VOCAB, WARM = 4, "fixed_width((2,), 'temperatures')"
ONE_TOKEN = Case(horizon=1, max_new_tokens=2)


def models() -> list[TabularModel]:
    return [table(5, VOCAB), table(17, VOCAB)]


error = partial(loop_error, models)


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ("chain(2)", "speculative_sampling"),
        ("fixed_width((2,), 'iid')", "k_seq"),
        ("fixed_width((2, 1))", "recursive_rejection_without_replacement"),
        ("fixed_width((3,), 'mixed')", "recursive_rejection"),
        ("best_first(3, 2, 2, 2)", "sample_and_match"),
    ],
)
def test_truncated_draft_laws(tree: str, verifier: str) -> None:
    for top_k in (1, 2):
        assert error(ONE_TOKEN, tree=tree, verifier=verifier, drafter=f"model({top_k=})") < 1e-12


def test_truncation_narrows_the_requests_own_rules() -> None:
    rules = SamplingRules(temperature=0.6, top_k=3, top_p=0.9)
    case = Case(horizon=2, max_new_tokens=2, rules=rules)
    parts = {"tree": "chain(2)", "verifier": "speculative_sampling", "drafter": "model(top_k=2)"}
    assert error(case, **parts) < 1e-12
    assert error(case, **parts, draft_rules=SamplingRules(temperature=1.5)) < 1e-12
    assert rules.within_top(2) == SamplingRules(temperature=0.6, top_k=2, top_p=0.9)
    assert rules.within_top(5) == rules
    assert SamplingRules().within_top(5) == SamplingRules(top_k=5)


@pytest.mark.parametrize("verifier", ["speculative_sampling", "recursive_rejection"])
def test_a_truncation_that_is_not_declared_is_seen(verifier: str) -> None:
    """The same truncation, declared with the full law: the text's law is lost."""
    undeclared = KNOWN_BAD_TREES["drawn from the top two, declared with the full law"]
    assert error(ONE_TOKEN, tree="chain(1)", verifier=verifier, drafter="model(top_k=2)") < 1e-12
    assert error(ONE_TOKEN, tree=undeclared, verifier="recursive_rejection") > 1e-3


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"drafter": "model(top_k=0)"}, "draft top_k must be at least 1, or None .*; got 0"),
        ({"draft_top_k": 2}, "unknown option 'draft_top_k'"),
        ({"tree": "chain(2, 'temperatures((1,), temperatures=(1,))')"}, "temperatures is given tw"),
        ({"tree": WARM, "verifier": "k_seq"}, "drawn as Independent; legal here: .*canonical"),
    ],
)
def test_bad_truncations_of_draft_laws_are_refused(parts: dict[str, object], message: str) -> None:
    with pytest.raises(MongeError, match=message):
        make_components(*models(), **parts)  # type: ignore[arg-type]
