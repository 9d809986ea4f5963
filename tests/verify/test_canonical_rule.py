"""The canonical rule: exact for every size, optimal for pairs where the program covers the support."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monge.core.errors import OptionError
from monge.laws.law import DenseLaw
from monge.laws.proposal import Deterministic, Iid, Independent, Proposal
from monge.oracle.exact_law import exact_law, law_error
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.canonical import tournament
from monge.verify.canonical import Canonical
from tests.kit.strategies import dense_law, weight_lists, weight_pairs
from tests.transport import reference_forms
from tests.transport.reference_forms import canonical_coupling
from tests.verify.acceptance import EXACT, masses
from tests.verify.flows import check_flow
from tests.verify.programs import remembered_programs  # noqa: F401
from tests.verify.test_node_rules import EDGES

Weights = list[int]


def emitted(rule: Canonical, p: DenseLaw, proposal: Proposal) -> dict[tuple[int, bool], float]:
    def run(draws):  # type: ignore[no-untyped-def]
        candidate_ids = proposal.draw(draws)
        token = rule.emit(p, proposal, candidate_ids, draws)
        return token, token in candidate_ids

    return exact_law(run)


def check(rule: Canonical, target: Weights, drafts: list[Weights], proposal: Proposal) -> float:
    """Exact, as in the theory, never above the optimum; returns the acceptance."""
    p = dense_law(target)
    law = emitted(rule, p, proposal)
    tokens = {
        token: law.get((token, True), 0.0) + law.get((token, False), 0.0)
        for token in range(len(target))
    }
    assert law_error(tokens, dict(enumerate(p.probs.tolist()))) < EXACT
    found = sum(prob for (_, accepted), prob in law.items() if accepted)
    laws = [masses(draft) for draft in drafts]
    problem = TransportProblem.from_draft_laws(masses(target), laws)
    tail = "first" if rule.tail == "first" else "ranked"
    if len(drafts) > 1:
        theirs = tournament(masses(target), laws, num_leading=rule.size, tail=tail).selection(
            problem
        )
        assert found == pytest.approx(canonical_coupling(problem, theirs).acceptance, abs=1e-9)
    best = reference_forms.different_drafts_optimum(masses(target), laws).acceptance
    assert found <= best + EXACT
    if len(drafts) == 1 or (len(drafts) == 2 and rule.size >= len(target)):
        assert found == pytest.approx(best, abs=1e-9)  # the linear program's own tolerance
    return found


@settings(max_examples=8)
@given(pair=weight_pairs(max_vocab=4), tail=st.sampled_from(["ranked", "first"]))
def test_equal_drafts(pair: tuple[Weights, Weights], tail: str) -> None:
    target, draft = pair
    for size, width in ((5, 1), (5, 2), (1, 2), (2, 3)):
        proposal = Iid(dense_law(draft), width)
        check(Canonical(size=size, tail=tail), target, [draft] * width, proposal)


@st.composite
def different(draw) -> list[Weights]:  # type: ignore[no-untyped-def]
    vocab = draw(st.integers(2, 4))
    return [draw(weight_lists(vocab)) for _ in range(4)]


@settings(max_examples=8)
@given(weights=different(), tail=st.sampled_from(["ranked", "first"]))
def test_different_drafts(weights: list[Weights], tail: str) -> None:
    target, *drafts = weights
    for size, width in ((5, 2), (1, 2), (2, 3)):
        proposal = Independent(tuple(map(dense_law, drafts[:width])))
        check(Canonical(size=size, tail=tail), target, drafts[:width], proposal)


@pytest.mark.parametrize("name", EDGES)
def test_the_canonical_rule_is_lossless_on_edge_cases(name: str) -> None:
    target, draft = EDGES[name]
    for tail in ("ranked", "first"):
        for size, width in ((5, 1), (5, 2), (2, 2), (2, 3)):
            check(
                Canonical(size=size, tail=tail),
                target,
                [draft] * width,
                Iid(dense_law(draft), width),
            )


def test_the_worked_example() -> None:
    assert check(
        Canonical(), [5, 3, 2], [[2, 3, 5]] * 2, Iid(dense_law([2, 3, 5]), 2)
    ) == pytest.approx(0.86, abs=1e-9)


@settings(max_examples=3)
@given(weights=different())
def test_flows_of_scaled_targets(weights: list[Weights]) -> None:
    target, *drafts = weights
    laws = tuple(map(dense_law, drafts))
    for rule in (Canonical(), Canonical(size=2, tail="first")):
        for scale in (1.0, 0.35):
            for proposal in (Iid(laws[0], 1), Iid(laws[0], 2), Independent(laws[:2])):
                check_flow(rule, dense_law(target), scale, proposal)
            check_flow(rule, dense_law(target), scale, Deterministic(laws[0].top(2)))
        check_flow(rule, dense_law(target), 0.35, Independent(laws))


def test_the_declared_laws_are_the_drawn_ones() -> None:
    proposal = Independent((dense_law([1, 0, 3]), dense_law([2, 2, 0])))
    declared = dict(CandidateLaw.from_proposal(3, proposal))
    assert law_error(exact_law(proposal.draw), declared) < EXACT


def test_more_leading_tokens_accept_more() -> None:
    """On these laws the truncation costs something, and the whole program is the optimum."""
    rng = np.random.default_rng(4)
    target, draft = (rng.integers(1, 9, 8).tolist() for _ in range(2))
    small, large = (
        check(Canonical(size=size), target, [draft] * 2, Iid(dense_law(draft), 2))
        for size in (1, 8)
    )
    assert small < large - 1e-3


def test_laws_of_different_supports_may_be_sparse() -> None:
    p, q1, q2 = dense_law([5, 3, 0, 2]), dense_law([0, 0, 3, 5]), dense_law([2, 0, 1, 0])
    dense, sparse = (
        emitted(Canonical(), p, Independent(laws))
        for laws in ((q1, q2), (q1.sparse(), q2.sparse()))
    )
    assert law_error(dense, sparse) < EXACT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must lie in 1..64; got 0"),
        ({"size": 65}, "size must lie in 1..64; got 65"),
        ({"tail": "last"}, "tail must be 'ranked' or 'first'; got 'last'"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Canonical(**settings)  # type: ignore[arg-type]


def test_no_laws_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one draft law"):
        Independent(())
