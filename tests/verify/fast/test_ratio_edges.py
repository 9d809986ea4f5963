"""The rule on a grid of ratios: exact for any grid, and close to the optimum on a fine one."""

import numpy as np
import pytest
import torch

from monge.core.draws import SeededDraws, TapeDraws
from monge.core.errors import OptionError
from monge.core.law import DenseLaw
from monge.core.proposal import Iid
from monge.transport.bounds import iid_optimum
from monge.transport.rearrangement import Rearrangement
from monge.transport.rearrangement_law import ScoreTable
from monge.verify.fast.ratio_edges import EdgeLine
from monge.verify.optimal import Optimal
from monge.verify.score_search import score
from tests.verify.acceptance import EXACT


def laws(seed: int, size: int, noise: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.normal(size=size)
    p, q = np.exp(logits), np.exp(logits + noise * rng.normal(size=size))
    p[0], q[-1] = 0.0, 0.0
    return p / p.sum(), q / q.sum()


def edge_law(line: EdgeLine, count: int) -> np.ndarray:
    """How often each edge is drawn, from the shares of the tokens."""
    drawn = np.zeros(count)
    np.add.at(drawn, line.cells, line.q * (1.0 - line.shares))
    np.add.at(drawn, line.cells + 1, line.q * line.shares)
    return drawn


@pytest.mark.parametrize(("width", "bins"), [(1, 1), (2, 1), (2, 4), (3, 1)])
def test_every_token_is_accepted_with_its_mass(width: int, bins: int) -> None:
    """By integration over positions and swaps.

    What all tuples of edges accept of each edge, handed down to the tokens.
    """
    p, q = laws(width, 5)
    line = EdgeLine.build(p, q, width, bins)
    drawn = edge_law(line, line.gains.size)
    used = np.flatnonzero(drawn)
    targets = drawn * _edges(bins, line.gains.size)
    table = ScoreTable.build(Rearrangement.build(targets[used], drawn[used], width))
    accepted = np.zeros(used.size)
    for candidates in np.ndindex(*(used.size,) * width):
        for edge, prob in table.accept_probs(tuple(sorted(candidates))).items():
            accepted[edge] += prob * np.prod(drawn[used][list(candidates)])
    gains = np.zeros(line.gains.size)
    gains[used] = accepted / drawn[used]
    tokens = q * ((1.0 - line.shares) * gains[line.cells] + line.shares * gains[line.cells + 1])
    np.testing.assert_allclose(tokens, line.masses, rtol=0, atol=EXACT)
    assert (line.masses <= p + EXACT).all()
    assert 1.0 - line.line.floor**width == pytest.approx(line.masses.sum(), abs=EXACT)


def _edges(bins: int, count: int) -> np.ndarray:
    """The grid in words: octaves above 2^-12, each cut into equal cells, moved to zero."""
    octave, cell = np.divmod(np.arange(count), bins)
    return 2.0 ** (octave - 12) * (1.0 + cell / bins) - 2.0**-12


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_a_fine_grid_loses_little(width: int) -> None:
    p, q = laws(width, 4000)
    best = iid_optimum(p, q, width).acceptance
    losses = [best - EdgeLine.build(p, q, width, bins).masses.sum() for bins in (1, 16, 256)]
    assert losses[0] > -EXACT
    assert -EXACT < losses[1] < 1e-3
    assert -EXACT < losses[2] < 1e-5


@pytest.mark.parametrize("width", [1, 2, 8])
def test_same_noise_same_verdict_as_the_plain_search_on_the_edges(width: int) -> None:
    p, q = laws(width, 60, noise=2.5)
    line = EdgeLine.build(p, q, width, 8)
    drawn = edge_law(line, line.gains.size)
    plain = Rearrangement.build(drawn * _edges(8, drawn.size), drawn / drawn.sum(), width)
    rng = np.random.default_rng(width)
    verdicts = []
    for _ in range(30):
        candidates, noise = rng.choice(q.size, size=width, p=q), rng.random((width, 2)).tolist()
        placed = [
            line.stands_for(int(y), position)
            for y, (position, _) in zip(candidates, noise, strict=True)
        ]
        scores = [
            score(plain, np.flatnonzero(plain.owners == edge), position, swap)
            for (edge, position), (_, swap) in zip(placed, noise, strict=True)
        ]
        best = int(np.argmin(scores))
        verdicts.append(best if scores[best] < plain.threshold else None)
        assert line.winner(candidates.tolist(), TapeDraws(np.ravel(noise).tolist())) == verdicts[-1]
    assert len(set(verdicts)) > 1


def test_the_rule_with_bins() -> None:
    p, q = (DenseLaw(torch.from_numpy(law)) for law in laws(3, 400, noise=2.0))
    draws = SeededDraws(1)
    rule, proposal = Optimal(bins=64), Iid(q, 2)
    pairs = [
        (rule.emit(p, proposal, candidates, draws), candidates)
        for candidates in (proposal.draw(draws) for _ in range(80))
    ]
    assert {token in candidates for token, candidates in pairs} == {True, False}
    assert all(p.prob(token) > 0.0 for token, _ in pairs)
    assert rule.emit(p.sparse(), Iid(q.sparse(), 1), (5,), draws) in range(400)


@pytest.mark.parametrize("bins", [0, 3, -2, 2**21])
def test_bins_are_a_power_of_two(bins: int) -> None:
    with pytest.raises(OptionError, match="bins must be a power of two from 1 to 1048576"):
        Optimal(bins=bins)
