"""Alignments against what defines them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.shape.diagonal import DiagonalMap
from monge.core.errors import OptionError
from monge.heads.shape.alignment import (
    ALIGNMENTS,
    GaussianMap,
    NoMap,
    SinkhornAnchors,
    monge_matrix,
)
from monge.heads.shape.head import StepAlignment

SIZE = 4


def cloud(seed: int, rows: int = 60, size: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64)
    points = torch.randn(rows, size, generator=generator, dtype=torch.float64) @ mixing
    return points + torch.randn(size, generator=generator)


def moments(states: Tensor) -> tuple[Tensor, Tensor]:
    return states.mean(dim=0), torch.cov(states.T, correction=0)


def check_close(found: Tensor, wanted: Tensor, error: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, atol=error, rtol=error)


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_the_gaussian_map_is_the_optimal_one(seed: int) -> None:
    """It pushes mean and covariance exactly, and is the gradient of a convex function at the Bures distance."""
    predicted, true = cloud(seed), cloud(seed + 1)
    alignment = GaussianMap(SIZE, diagonal=0).double()
    alignment.fit(predicted, true)
    (_, from_), (mean, to) = moments(predicted), moments(true)
    for found, wanted in zip(moments(alignment.map(predicted)), (mean, to), strict=True):
        check_close(found, wanted, 1e-8)
    matrix = monge_matrix(from_, to)
    check_close(matrix, matrix.T, 1e-8)
    assert float(torch.linalg.eigvalsh(matrix)[0]) > 0
    cost = torch.trace(from_ + to - 2 * matrix @ from_)
    values = torch.linalg.eigvals(from_ @ to).real.clamp_min(0).sqrt().sum()
    check_close(cost, torch.trace(from_ + to) - 2 * values, 1e-6)


@pytest.mark.parametrize("cls", [GaussianMap, DiagonalMap, NoMap])
def test_equal_laws_are_left_alone(cls: type) -> None:
    states = cloud(5)
    alignment = cls(SIZE).double()
    alignment.fit(states, states.flip(0))
    check_close(alignment.map(states), states)


def test_the_diagonal_map_pushes_the_marginals_and_no_correlation() -> None:
    predicted, true = cloud(1), cloud(2)
    predicted[:, 0] = 3.0
    alignment = DiagonalMap(SIZE).double()
    alignment.fit(predicted, true)
    mapped = alignment.map(predicted)
    check_close(mapped.mean(dim=0), true.mean(dim=0))
    check_close(mapped.std(dim=0)[1:], true.std(dim=0)[1:])
    check_close(torch.corrcoef(mapped[:, 1:].T), torch.corrcoef(predicted[:, 1:].T), 1e-6)


def test_singular_predictions_need_a_diagonal() -> None:
    flat = cloud(1)
    flat[:, 0] = 0.0
    with pytest.raises(OptionError, match="no variance in some direction"):
        GaussianMap(SIZE, diagonal=0).fit(flat, cloud(2))
    GaussianMap(SIZE).fit(flat, cloud(2))


def test_anchors_are_the_clusters_of_true_states() -> None:
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    noise = [
        0.1 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
        for count in (30, 20, 10)
    ]
    true = torch.cat([centre + part for centre, part in zip(centres, noise, strict=True)])
    alignment = SinkhornAnchors(2, num_anchors=3, blur=0.01).double()
    alignment.fit(true, true[torch.randperm(60, generator=generator)])
    nearest = torch.cdist(centres, alignment.anchors).argmin(dim=1)
    check_close(alignment.anchors[nearest], centres, 0.1)
    assert alignment.masses[nearest].tolist() == pytest.approx([0.5, 1 / 3, 1 / 6])
    near = alignment.map(centres[[0, 0, 0, 1, 1, 2]] + 1.0)
    check_close(near[[0, 3, 5]], centres, 0.2)
    assert alignment.map(centres[:0]).shape == (0, 2)
    with pytest.raises(OptionError, match="256 anchors need as many states; got 60"):
        SinkhornAnchors(SIZE).fit(cloud(1), cloud(2))


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_strength_blends_within_the_subspace(name: str) -> None:
    predicted, true = cloud(1, rows=300, size=6), cloud(2, rows=300, size=6)
    step = StepAlignment(ALIGNMENTS[name](2), 6).double()
    basis, _ = torch.linalg.qr(cloud(3, rows=6, size=6))
    step.subspace.copy_(basis[:2])
    step.alignment.fit(predicted @ basis[:2].T, true @ basis[:2].T)
    check_close(step.map(predicted), predicted)
    step.strength.fill_(1.0)
    full = step.map(predicted)
    check_close(full @ basis[:2].T, step.alignment.map(predicted @ basis[:2].T))
    check_close(full @ basis[2:].T, predicted @ basis[2:].T)
    step.strength.fill_(0.5)
    check_close(step.map(predicted), (full + predicted) / 2)
