"""The optimal rule draws positions, which have no branches.

Its law is proved by exact integration over them.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.acceptance.given_candidates import OptimalGivenCandidates
from lab.acceptance.rearrangement import Rearrangement
from lab.acceptance.score_table import ScoreTable
from monge.laws.draws import SeededDraws, TapeDraws
from monge.laws.law import DenseLaw, SparseLaw
from monge.laws.proposal import Deterministic, Iid, Mixed
from monge.oracle.exact_law import OracleError, exact_law, law_error
from monge.transport.bounds import iid_optimum, mixed_optimum
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.coupling import Coupling
from monge.verify.functional.lines import SMALLEST_MASS
from monge.verify.optimal import Optimal
from monge.verify.registry import VERIFIERS
from tests.kit.strategies import dense_law, weight_pairs
from tests.verify.acceptance import EXACT, masses
from tests.verify.plain_search import nearest_below, partners, score

PAIRS = {
    "worked example": ([5, 3, 2], [2, 3, 5]),
    "equal": ([5, 3, 2], [5, 3, 2]),
    "ties": ([1, 2, 3, 4], [2, 1, 4, 3]),
    "disjoint": ([1, 1, 0, 0], [0, 0, 1, 1]),
    "draft is a point": ([5, 3, 2], [0, 1, 0]),
    "target is a point": ([0, 1, 0], [2, 3, 5]),
    "zeros on both sides": ([0, 3, 1, 0, 2], [2, 0, 1, 0, 3]),
    "window at the threshold": ([0, 1, 1], [12, 13, 13]),
}


class Searched(Rearrangement):
    """The score map of the transport room, with the rule's own search for partners."""

    __slots__ = ()

    def nearest_below(self, u, is_right):  # type: ignore[no-untyped-def]
        return nearest_below(self, u, is_right)

    def partners(self, u):  # type: ignore[no-untyped-def]
        return partners(self, u)


def integrated(
    p: np.ndarray, q: np.ndarray, width: int, fixed: tuple[int, ...] = ()
) -> tuple[Coupling, Rearrangement]:
    """The rule's accept probabilities given every tuple of draws, by integration over positions and swaps."""
    outside = p.copy()
    outside[list(fixed)] = 0.0
    line = Searched.build(outside, q, width)
    table = ScoreTable.build(line)
    candidates = CandidateLaw.mixed(fixed, q, width) if fixed else CandidateLaw.iid(q, width)
    kernel = np.zeros((len(candidates.tuples), p.size))
    for row, candidate_ids in enumerate(candidates.tuples):
        accepted = table.accept_probs(tuple(sorted(candidate_ids[len(fixed) :])))
        kernel[row, list(accepted)] = list(accepted.values())
    return Coupling.from_kernel(TransportProblem(target=p, candidates=candidates), kernel), line


def check(p: np.ndarray, q: np.ndarray, width: int, fixed: tuple[int, ...] = ()) -> None:
    coupling, line = integrated(p, q, width, fixed)
    np.testing.assert_allclose(coupling.accepted_masses, line.accepted_masses, rtol=0, atol=EXACT)
    assert coupling.law_error < EXACT
    best = mixed_optimum(p, fixed, q, width) if fixed else iid_optimum(p, q, width)
    assert coupling.acceptance == pytest.approx(best.acceptance, abs=EXACT)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_token_is_accepted_with_its_mass(name: str, width: int) -> None:
    p, q = map(masses, PAIRS[name])
    check(p, q, width)


@settings(max_examples=12)
@given(pair=weight_pairs(max_vocab=4), width=st.integers(2, 3))
def test_laws_with_zeros_ties_and_disjoint_supports(
    pair: tuple[list[int], list[int]], width: int
) -> None:
    p, q = map(masses, pair)
    check(p, q, width)


@pytest.mark.parametrize("width", [1, 2])
def test_deterministic_candidates_beside_the_draws(width: int) -> None:
    p, q = masses([5, 3, 2, 4, 1]), masses([0, 3, 5, 0, 2])
    check(p, q, width, fixed=(0, 3))


@pytest.mark.parametrize(
    ("name", "num_fixed"),
    [
        *((name, 0) for name in PAIRS),
        ("disjoint", 1),
        ("draft is a point", 1),
        ("zeros on both sides", 2),
    ],
)
def test_the_rule_decides_as_the_theory_does(name: str, num_fixed: int) -> None:
    """On one tape: the theory's slow search for partners and its residual, against the rule."""
    weights = PAIRS[name]
    p, q = map(dense_law, weights)
    fixed = tuple(token for token in range(len(weights[0])) if q.prob(token) == 0.0)[:num_fixed]
    assert len(fixed) == num_fixed
    proposal = Mixed(fixed, q, 3) if fixed else Iid(q, 3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(60):
        tape = torch.rand(10, generator=generator, dtype=torch.float64).tolist()
        candidate_ids = proposal.draw(TapeDraws(tape[:3]))
        found = Optimal().emit(p, proposal, candidate_ids, TapeDraws(tape[3:]))
        expected = decided(weights, fixed, candidate_ids[num_fixed:], tape[3:])
        assert found == expected
        assert Optimal().emit(p.sparse(), proposal, candidate_ids, TapeDraws(tape[3:])) == expected


def decided(weights, fixed, drawn, tape):  # type: ignore[no-untyped-def]
    p, q = map(masses, weights)
    outside = p.copy()
    outside[list(fixed)] = 0.0
    line = Rearrangement.build(outside, q, len(drawn))
    scores = [
        line.score(token, *tape[2 * index : 2 * index + 2]) for index, token in enumerate(drawn)
    ]
    if min(scores) < line.threshold:
        return drawn[int(np.argmin(scores))]
    left = np.maximum(p - line.accepted_masses, 0.0)
    law = DenseLaw(torch.from_numpy(left / left.sum() if left.sum() > 0.0 else p))
    return law.quantile(tape[2 * len(drawn)])


def test_one_draw_is_speculative_sampling() -> None:
    p, q = map(masses, PAIRS["zeros on both sides"])
    coupling, _ = integrated(p, q, 1)
    for (candidate_ids, _), row in zip(coupling.problem.candidates, coupling.kernel, strict=True):
        assert row[candidate_ids[0]] == pytest.approx(
            min(1.0, p[candidate_ids[0]] / q[candidate_ids[0]]), abs=EXACT
        )


def test_deterministic_candidates_alone_are_sampled_and_matched() -> None:
    p = dense_law([5, 3, 2])
    law = exact_law(lambda draws: Optimal().emit(p, Deterministic((0, 1)), (0, 1), draws))
    assert law_error(law, {0: 0.5, 1: 0.3, 2: 0.2}) < EXACT


def test_it_is_declared_not_enumerable_and_is_not() -> None:
    assert not Optimal().is_enumerable
    assert OptimalGivenCandidates().is_enumerable
    assert not VERIFIERS.make("optimal").is_enumerable
    q = dense_law([2, 3, 5])
    with pytest.raises(OracleError, match="has no branches"):
        exact_law(lambda draws: Optimal().emit(dense_law([5, 3, 2]), Iid(q, 2), (0, 1), draws))


def test_a_draft_mass_without_a_finite_ratio_is_refused() -> None:
    q = SparseLaw(
        torch.tensor([0, 1]), torch.tensor([1.0, SMALLEST_MASS / 10], dtype=torch.float64)
    )
    p = dense_law([1, 1])
    for seed in range(8):
        draws = SeededDraws(seed)
        assert Optimal().emit(p, Iid(q, 1), (1,), draws) in (0, 1)
    line = Rearrangement.build(masses([5, 3, 2]), masses([2, 3, 5]), 2)
    assert score(line, np.array([], dtype=np.int64), 0.5, 0.5) == 1.0


@pytest.mark.parametrize("width", [2, 8])
def test_a_full_vocabulary(width: int) -> None:
    """Scores keep their law at 128k tokens.

    What the partner brings is what the position lacks, in each window that is hit.
    """
    generator = torch.Generator().manual_seed(width)
    logits = 3.0 * torch.randn(131_072, generator=generator, dtype=torch.float64)
    noise = 0.7 * torch.randn(131_072, generator=generator, dtype=torch.float64)
    p, q = DenseLaw(logits.softmax(0)), DenseLaw((logits + noise).softmax(0))
    line = Rearrangement.build(p.probs.numpy(), q.probs.numpy(), width)
    u = torch.rand(32, generator=generator, dtype=torch.float64).numpy()
    partner = partners(line, u)
    swap = line.swap_probs(u, partner)
    received = (1.0 - swap) * line.densities(u) + swap * line.densities(partner)
    np.testing.assert_allclose(received, line.gains[line.windows_of(u)], rtol=1e-12, atol=1e-12)
    back = partners(line, partner)
    np.testing.assert_allclose(back, u, rtol=0, atol=1e-7)
    draws = SeededDraws(width)
    candidate_ids = Iid(q, width).draw(draws)
    token = Optimal().emit(p, Iid(q, width), candidate_ids, draws)
    assert 0 <= token < 131_072
