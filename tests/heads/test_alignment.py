"""Maps and divergence of predicted states against what defines them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from lab.shape.diagonal import DiagonalMap
from monge.core.errors import OptionError
from monge.heads.shape.alignment import (
    ALIGNMENTS,
    GaussianMap,
    NoMap,
    SinkhornAnchors,
    log_plan,
    mean_cost,
    monge_matrix,
    sinkhorn_divergence,
    squared_distances,
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


MANY = 400
"""Iterations that converge at these entropies."""


def points(seed: int, rows: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64) + shift


def masses(seed: int, rows: int) -> Tensor:
    return torch.softmax(points(seed, rows)[:, 0], dim=0)


def test_clouds_far_from_zero_keep_their_distances() -> None:
    """In float32, as hidden states are."""
    left, right = points(5, 6).float() + 3000.0, points(6, 7).float() + 3000.0
    exact = torch.cdist(left.double(), right.double()).square()
    torch.testing.assert_close(squared_distances(left, right).double(), exact, atol=1e-4, rtol=1e-4)


def test_small_entropy_approaches_the_linear_program() -> None:
    left, right, a, b = points(1, 4), points(2, 5, shift=1.0), masses(1, 4), masses(2, 5)
    cost = squared_distances(left, right)
    rows, columns = np.kron(np.eye(4), np.ones((1, 5))), np.kron(np.ones((1, 4)), np.eye(5))
    marginals = np.concatenate([a.numpy(), b.numpy()])
    equations = np.concatenate([rows, columns])
    optimum = linprog(cost.flatten().numpy(), A_eq=equations, b_eq=marginals).fun
    plan = log_plan(cost, a, b, 2e-2, 2000).exp()
    torch.testing.assert_close(plan.sum(dim=0), b, atol=1e-8, rtol=0)
    assert float((plan * cost).sum()) == pytest.approx(optimum, abs=2e-2)


@settings(max_examples=5)
@given(seed=st.integers(0, 10_000), blur=st.sampled_from([0.3, 1.0]))
def test_the_divergence_is_positive_and_zero_for_equal_clouds(seed: int, blur: float) -> None:
    left, right = points(seed, 6), points(seed + 1, 6, shift=0.3)
    assert float(sinkhorn_divergence(left, right, blur, MANY)) > 0
    same = float(sinkhorn_divergence(left, left.flip(0), blur, MANY))
    assert same == pytest.approx(0.0, abs=1e-9)


def test_it_is_the_debiased_dual_value() -> None:
    """Recomputed from the definition, entropy and all, with converged plans."""
    left, right = points(3, 5), points(4, 7, shift=0.5)
    scale = mean_cost(squared_distances(left, right))

    def transport(first: Tensor, second: Tensor) -> float:
        cost = squared_distances(first, second) / scale
        a, b = (torch.full_like(points[:, 0], 1 / len(points)) for points in (first, second))
        log = log_plan(cost, a, b, 0.1, MANY)
        divergence = (log.exp() * (log - (a.log()[:, None] + b.log()))).sum()
        return float((log.exp() * cost).sum() + 0.1 * divergence)

    expected = transport(left, right) - transport(left, left) / 2 - transport(right, right) / 2
    assert float(sinkhorn_divergence(left, right, 0.1, MANY)) == pytest.approx(expected, abs=1e-7)
    few = float(sinkhorn_divergence(points(7, 64), points(8, 64, shift=1.0)))
    many = float(sinkhorn_divergence(points(7, 64), points(8, 64, shift=1.0), 0.05, MANY))
    assert few == pytest.approx(many, rel=0.1), "a few iterations are enough for a loss"


def test_the_envelope_gradient_is_the_gradient() -> None:
    """With the mean cost held fixed, against central differences of the converged value."""
    left, right = points(5, 4), points(6, 4, shift=0.4)
    scale = mean_cost(squared_distances(left, right))
    moving = left.clone().requires_grad_()
    sinkhorn_divergence(moving, right, 0.2, MANY).backward()
    assert moving.grad is not None

    def value(points: Tensor) -> float:
        # The blur counts in units of a mean cost that moves with the points; dividing it out keeps
        # the entropy where it was.
        own = mean_cost(squared_distances(points, right))
        return float(sinkhorn_divergence(points, right, 0.2 * scale / own, MANY)) * own / scale

    for row, column in ((0, 0), (2, 1)):
        step = torch.zeros_like(left)
        step[row, column] = 1e-4
        slope = (value(left + step) - value(left - step)) / 2e-4
        assert float(moving.grad[row, column]) == pytest.approx(slope, abs=1e-6)


def test_equal_points_cost_nothing_and_divide_nothing() -> None:
    same = torch.ones(3, 2, dtype=torch.float64)
    assert float(sinkhorn_divergence(same, same)) == 0.0
