"""The verifier `systematic`: lossless for every design, optimal for its joint law, and a flow for scaled targets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monge.core.draws import TapeDraws
from monge.core.proposal import Deterministic
from monge.core.systematic import Systematic, SystematicDesign
from monge.testing.oracle import exact_law, law_error
from monge.transport.bounds import without_replacement_optimum
from monge.transport.candidates import TransportProblem
from monge.transport.linear_program import solve
from monge.verify.problem import NodeProblem
from monge.verify.systematic import EarliestDeadline
from tests.kit.strategies import dense_law, weight_pairs
from tests.verify.acceptance import EXACT, acceptance, masses
from tests.verify.flows import check_flow

DESIGNS = {
    "default": SystematicDesign(),
    "in proportion": SystematicDesign(exponent=1.0),
    "flat, in rows": SystematicDesign(exponent=0.5, layout="snake"),
    "top tokens only": SystematicDesign(top=3),
}
WORKED = ([5, 3, 2], [2, 3, 5])


def emitted(p, drawn, declared):  # type: ignore[no-untyped-def]
    return exact_law(lambda draws: EarliestDeadline().emit(p, declared, drawn.draw(draws), draws))


def truth(weights: list[int]) -> dict[int, float]:
    return {token: mass for token, mass in enumerate(masses(weights).tolist()) if mass > 0.0}


@settings(max_examples=25)
@given(
    pair=weight_pairs(max_vocab=6), width=st.integers(1, 4), design=st.sampled_from(sorted(DESIGNS))
)
def test_lossless_and_optimal(pair: tuple[list[int], list[int]], width: int, design: str) -> None:
    p, q = map(dense_law, pair)
    proposal = Systematic(q, width, DESIGNS[design])
    assert law_error(emitted(p, proposal, proposal), truth(pair[0])) < EXACT
    best = solve(TransportProblem.from_proposal(masses(pair[0]), proposal)).acceptance
    assert acceptance("systematic", p, proposal) == pytest.approx(best, abs=1e-9)


def test_sparse_and_dense_laws_are_one_law() -> None:
    p, q = dense_law([5, 3, 0, 2]), dense_law([2, 0, 3, 5])
    dense, sparse = Systematic(q, 2), Systematic(q.sparse(), 2)
    assert dense.cells == sparse.cells
    assert law_error(emitted(p, dense, dense), emitted(p.sparse(), sparse, sparse)) < EXACT


def test_the_worked_example() -> None:
    """Between the optima of fixed top tokens and of draws without replacement, which no fast rule attains."""
    p, q = map(dense_law, WORKED)
    found = acceptance("systematic", p, Systematic(q, 2, DESIGNS["in proportion"]))
    # Token 2 always, and one of the others in proportion to q.
    assert found == pytest.approx(0.9, abs=EXACT)
    assert found < without_replacement_optimum(*map(masses, WORKED), 2).acceptance


@settings(max_examples=15)
@given(
    pair=weight_pairs(max_vocab=5), width=st.integers(1, 3), scale=st.sampled_from([1.0, 0.6, 0.05])
)
def test_flow(pair: tuple[list[int], list[int]], width: int, scale: float) -> None:
    p, q = map(dense_law, pair)
    check_flow(EarliestDeadline(), p, scale, Systematic(q, width))
    check_flow(EarliestDeadline(), p, scale, Deterministic(q.top(width)))


@settings(max_examples=15)
@given(pair=weight_pairs(max_vocab=5), width=st.integers(1, 3), scale=st.sampled_from([0.6, 0.05]))
def test_the_flow_of_a_scaled_target_is_optimal(
    pair: tuple[list[int], list[int]], width: int, scale: float
) -> None:
    """The scaled target is the law (s p, 1 - s) with one more token, which is never drafted."""
    p, q = map(dense_law, pair)
    proposal = Systematic(q, width)
    with_rest = np.append(scale * masses(pair[0]), 1.0 - scale)
    flow = EarliestDeadline().flow(node(p, scale, proposal))
    cells = dict(zip(proposal.cells.candidates, proposal.cells.lengths, strict=True))
    best = solve(TransportProblem.from_joint_law(with_rest, cells)).acceptance
    assert float(flow.masses.sum()) == pytest.approx(best, abs=1e-9)


def node(p, scale, proposal):  # type: ignore[no-untyped-def]
    candidates = proposal.cells.candidates[0]
    return NodeProblem(
        target_law=p, scale=scale, proposal=proposal, candidates=candidates, draws=TapeDraws(())
    )


def test_deterministic_candidates_are_the_target_walk() -> None:
    p = dense_law([5, 3, 2])
    law = exact_law(lambda draws: EarliestDeadline().emit(p, Deterministic((0, 1)), (0, 1), draws))
    assert law_error(law, {0: 0.5, 1: 0.3, 2: 0.2}) < EXACT


def test_the_declared_cells_must_be_those_that_were_drawn() -> None:
    """The same candidates with other lengths: the law is lost, so this test can fail."""
    p, drawn = dense_law([1, 1, 2]), Systematic(dense_law([1, 4, 8]), 2)
    declared = Systematic(dense_law([3, 4, 8]), 2)
    assert set(drawn.cells.candidates) == set(declared.cells.candidates)
    assert law_error(emitted(p, drawn, declared), truth([1, 1, 2])) > 1e-2
