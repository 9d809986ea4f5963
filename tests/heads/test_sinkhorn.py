"""The Sinkhorn solver against a linear program, and the divergence against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from monge.heads.shape.alignment import log_plan, mean_cost, sinkhorn_divergence, squared_distances

MANY = 400
"""Iterations that converge at these entropies."""


def cloud(seed: int, rows: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64) + shift


def masses(seed: int, rows: int) -> Tensor:
    return torch.softmax(cloud(seed, rows)[:, 0], dim=0)


def test_clouds_far_from_zero_keep_their_distances() -> None:
    """In float32, as hidden states are."""
    left, right = cloud(5, 6).float() + 3000.0, cloud(6, 7).float() + 3000.0
    exact = torch.cdist(left.double(), right.double()).square()
    torch.testing.assert_close(squared_distances(left, right).double(), exact, atol=1e-4, rtol=1e-4)


def test_small_entropy_approaches_the_linear_program() -> None:
    left, right, a, b = cloud(1, 4), cloud(2, 5, shift=1.0), masses(1, 4), masses(2, 5)
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
    left, right = cloud(seed, 6), cloud(seed + 1, 6, shift=0.3)
    assert float(sinkhorn_divergence(left, right, blur, MANY)) > 0
    same = float(sinkhorn_divergence(left, left.flip(0), blur, MANY))
    assert same == pytest.approx(0.0, abs=1e-9)


def test_it_is_the_debiased_dual_value() -> None:
    """Recomputed from the definition, entropy and all, with converged plans."""
    left, right = cloud(3, 5), cloud(4, 7, shift=0.5)
    scale = mean_cost(squared_distances(left, right))

    def transport(first: Tensor, second: Tensor) -> float:
        cost = squared_distances(first, second) / scale
        a, b = (torch.full_like(points[:, 0], 1 / len(points)) for points in (first, second))
        log = log_plan(cost, a, b, 0.1, MANY)
        divergence = (log.exp() * (log - (a.log()[:, None] + b.log()))).sum()
        return float((log.exp() * cost).sum() + 0.1 * divergence)

    expected = transport(left, right) - transport(left, left) / 2 - transport(right, right) / 2
    assert float(sinkhorn_divergence(left, right, 0.1, MANY)) == pytest.approx(expected, abs=1e-7)
    few = float(sinkhorn_divergence(cloud(7, 64), cloud(8, 64, shift=1.0)))
    many = float(sinkhorn_divergence(cloud(7, 64), cloud(8, 64, shift=1.0), 0.05, MANY))
    assert few == pytest.approx(many, rel=0.1), "a few iterations are enough for a loss"


def test_the_envelope_gradient_is_the_gradient() -> None:
    """With the mean cost held fixed, against central differences of the converged value."""
    left, right = cloud(5, 4), cloud(6, 4, shift=0.4)
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
