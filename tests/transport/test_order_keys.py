"""Key sets: disjoint, of the right length and mass, also for many tokens."""

import numpy as np
import pytest

from monge.core.errors import LawError
from monge.transport.bounds import iid_optimum
from monge.transport.candidates import CandidateLaw
from monge.transport.coupling import Coupling
from monge.transport.order_keys import OrderKeys, selection_law
from monge.transport.problem import TransportProblem
from tests.transport.strategies import EDGES, A, as_law


def large_pair(num_tokens, spread, noise):
    rng = np.random.default_rng(11)
    p = rng.standard_normal(num_tokens) * spread
    return as_law(np.exp(p - p.max())), as_law(
        np.exp(p - p.max() + noise * rng.standard_normal(num_tokens))
    )


@pytest.mark.parametrize(
    ("num_tokens", "width", "spread", "noise"),
    # With lengths taken as stop - start, the first misses its masses by 5e-7, and larger
    # vocabularies by far more.
    [(4096, 8, 6.0, 3.0), (8192, 8, 3.0, 0.8), (2000, 16, 10.0, 0.8), (4096, 2, 1.0, 0.8)],
)
def test_stored_hole_lengths_keep_the_masses(num_tokens, width, spread, noise):
    p, q = large_pair(num_tokens, spread, noise)
    keys = OrderKeys.build(p, q, width)
    wanted = selection_law(p, q, width)
    assert np.abs(keys.winner_law - wanted).sum() < 1e-11
    lengths = np.bincount(keys.owners, weights=keys.stops - keys.starts, minlength=num_tokens)
    assert np.abs(lengths - q).sum() < 1e-11
    assert np.abs(keys.starts[1:] - keys.stops[:-1]).max() < 1e-10  # the sets tile [0, 1]
    assert np.minimum(p, keys.winner_law).sum() == pytest.approx(
        iid_optimum(p, q, width).acceptance, abs=1e-11
    )


@pytest.mark.parametrize("name", EDGES)
def test_selection_law(name):
    p, q, width = EDGES[name]
    x = selection_law(p, q, width)
    assert x.sum() == pytest.approx(1.0, abs=1e-14)
    assert np.minimum(p, x).sum() == pytest.approx(iid_optimum(p, q, width).acceptance, abs=1e-14)
    keys = OrderKeys.build(p, q, width)
    np.testing.assert_allclose(keys.winner_law, x, rtol=0, atol=1e-14)
    assert keys.starts[0] == pytest.approx(0.0, abs=1e-15)
    np.testing.assert_allclose(keys.stops[:-1], keys.starts[1:], rtol=0, atol=1e-14)


def test_winners_given_the_tuple():
    keys = OrderKeys.build(*A, 3)
    law = np.zeros(3)
    for candidate_ids, prob in CandidateLaw.iid(A[1], 3):
        probs = keys.selection_probs(candidate_ids)
        assert set(probs) == set(candidate_ids)
        assert sum(probs.values()) == pytest.approx(1.0, abs=1e-14)
        for token, share in probs.items():
            law[token] += prob * share
    np.testing.assert_allclose(law, keys.winner_law, rtol=0, atol=1e-15)


def test_any_disjoint_sets_are_lossless():
    p, q = A
    edges = np.concatenate([[0.0], np.cumsum(q)])
    starts, stops = edges[:-1], edges[1:]  # tokens side by side: far from optimal
    keys = OrderKeys(
        width=2,
        num_tokens=3,
        owners=np.arange(3),
        starts=starts,
        stops=stops,
        winner_law=stops**2 - starts**2,
    )
    problem = TransportProblem(target=p, candidates=CandidateLaw.iid(q, 2))
    kernel = np.zeros((9, 3))
    for row, candidate_ids in enumerate(problem.candidates.tuples):
        for token, share in keys.selection_probs(candidate_ids).items():
            kernel[row, token] = share * min(1.0, p[token] / keys.winner_law[token])
    coupling = Coupling.from_kernel(problem, kernel)
    assert coupling.is_lossless
    np.testing.assert_allclose(coupling.accepted_masses, np.minimum(p, keys.winner_law), atol=1e-15)
    assert coupling.acceptance < iid_optimum(p, q, 2).acceptance - 0.1


def test_token_without_keys():
    keys = OrderKeys.build(A[0], np.array([0.5, 0.0, 0.5]), 2)
    with pytest.raises(LawError, match="token 1 has no key set"):
        keys.selection_probs((0, 1))
