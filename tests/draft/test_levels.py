"""Draws from large vocabularies: sums of blocks give the token that one running sum gives."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monge.laws import quantiles
from monge.laws.quantiles import in_blocks, independent
from tests.engine import pretend

ROUNDING = 1e-13


def laws(vocab, seed, num_zeros):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(vocab, 0.3), size=3)
    probs[:, rng.permutation(vocab)[:num_zeros]] = 0.0
    return torch.from_numpy(probs)


@given(
    vocab=st.integers(1, 1700),
    seed=st.integers(0, 1 << 30),
    share=st.floats(0, 0.99),
    is_normalised=st.booleans(),
)
def test_blocks_give_the_token_at_a_position(vocab, seed, share, is_normalised):
    probs = laws(vocab, seed, int(share * vocab))
    probs = probs[probs.sum(1) > 0]
    if is_normalised:
        probs = probs / probs.sum(1, keepdim=True)
    sums = probs.cumsum(1)
    # On boundaries, beside them, and anywhere.
    rng = np.random.default_rng(seed)
    on = (sums / sums[:, -1:])[:, rng.integers(0, vocab, 3)]
    off = torch.from_numpy(rng.random((len(probs), 3)))
    sides = [torch.nextafter(on, torch.full_like(on, end)) for end in (0.0, 1.0)]
    positions = torch.cat([on, *sides, off, torch.zeros_like(on)], 1).clamp(0, 1 - 2**-53)
    found = in_blocks(probs, positions)
    assert (probs.gather(1, found) > 0).all()
    wanted, ends = positions * sums[:, -1:], sums.gather(1, found)
    assert (wanted < ends + ROUNDING).all()
    assert (wanted >= ends - probs.gather(1, found) - ROUNDING).all()


@pytest.mark.parametrize("vocab", [5, 512, 1025])
def test_a_law_that_is_no_number_gives_no_token(vocab):
    probs = laws(vocab, 0, 0)
    probs[1, 3] = torch.nan
    positions = torch.full((3, 2), 0.5, dtype=torch.float64)
    for draw in (independent, in_blocks):
        assert draw(probs, positions)[1].tolist() == [-1, -1]
        assert (draw(probs, positions)[[0, 2]] >= 0).all()


def test_a_device_adds_up_large_vocabularies_in_blocks(monkeypatch):
    monkeypatch.setattr(quantiles, "_LARGE", 700)
    used = []
    monkeypatch.setattr(
        quantiles, "in_blocks", lambda *given: used.append(given[0].shape[1]) or in_blocks(*given)
    )
    with pretend.device() as device:
        for vocab in (699, 700):
            probs, positions = laws(vocab, 1, 9), torch.rand(3, 4, dtype=torch.float64)
            found = independent(probs.to(device), positions.to(device))
            assert found.tolist() == independent(probs, positions).tolist()
    assert used == [700]
