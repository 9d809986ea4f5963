"""Entropic optimal transport between clouds of points, in the log domain, and the debiased divergence as a loss.

Costs are squared Euclidean distances; entropies are in the units of the cost. Reference: Feydy et
al., Interpolating between optimal transport and MMD using Sinkhorn divergences (arXiv 1810.08278).
"""

import torch
from jaxtyping import Float
from torch import Tensor


def squared_distances(
    left: Float[Tensor, "left size"], right: Float[Tensor, "right size"]
) -> Float[Tensor, "left right"]:
    """Squared Euclidean distance of every pair."""
    # About a common centre: hidden states lie far from zero, where float32 would lose what tells
    # them apart.
    centre = right.detach().mean(dim=0)
    left, right = left - centre, right - centre
    norms = left.square().sum(dim=1)[:, None] + right.square().sum(dim=1)
    return (norms - 2.0 * left @ right.T).clamp_min(0.0)


def mean_cost(cost: Float[Tensor, "left right"]) -> float:
    """Mean of the costs; 1 where all are zero, so that entropies stay positive."""
    mean = float(cost.mean())
    return mean if mean > 0.0 else 1.0


def potentials(
    cost: Float[Tensor, "left right"],
    left_masses: Float[Tensor, " left"],
    right_masses: Float[Tensor, " right"],
    entropy: float,
    num_iterations: int,
) -> tuple[Float[Tensor, " left"], Float[Tensor, " right"]]:
    """Dual potentials after `num_iterations` Sinkhorn iterations from zero; the right ones are updated last."""
    left, right = torch.zeros_like(left_masses), torch.zeros_like(right_masses)
    log_left, log_right = left_masses.log(), right_masses.log()
    for _ in range(num_iterations):
        left = -entropy * torch.logsumexp(log_right + (right - cost) / entropy, dim=1)
        shifted = (log_left + left / entropy)[:, None] - cost / entropy
        right = -entropy * torch.logsumexp(shifted, dim=0)
    return left, right


def log_plan(
    cost: Float[Tensor, "left right"],
    left_masses: Float[Tensor, " left"],
    right_masses: Float[Tensor, " right"],
    entropy: float,
    num_iterations: int,
) -> Float[Tensor, "left right"]:
    """Logarithm of the entropic plan; minus infinity for points without mass."""
    left, right = potentials(cost, left_masses, right_masses, entropy, num_iterations)
    outer = left_masses.log()[:, None] + right_masses.log()
    return outer + (left[:, None] + right - cost) / entropy


def sinkhorn_divergence(
    left: Float[Tensor, "left size"],
    right: Float[Tensor, "right size"],
    blur: float | int = 0.05,
    num_iterations: int = 8,
) -> Float[Tensor, ""]:
    """OT(left, right) - OT(left, left) / 2 - OT(right, right) / 2, each cloud with equal masses.

    The costs are divided by their mean over the two clouds, the same for the three terms, so the
    value has no unit. Its gradient holds the potentials fixed (envelope theorem), which is exact
    where the iterations have converged and never differentiates through them.

    Args:
        left: Points; gradients flow to both clouds.
        right: Points.
        blur: Entropy, in units of the mean cost.
        num_iterations: Sinkhorn iterations.
    """
    scale = mean_cost(squared_distances(left.detach(), right.detach()))
    terms = [
        _transport(first, second, blur * scale, num_iterations)
        for first, second in ((left, right), (left, left), (right, right))
    ]
    return (terms[0] - 0.5 * terms[1] - 0.5 * terms[2]) / scale


def _transport(left: Tensor, right: Tensor, entropy: float, num_iterations: int) -> Tensor:
    cost = squared_distances(left, right)
    with torch.no_grad():
        a, b = (torch.full_like(points[:, 0], 1.0 / len(points)) for points in (left, right))
        f, g = potentials(cost, a, b, entropy, num_iterations)
        plan = torch.exp((f[:, None] + g - cost) / entropy) * a[:, None] * b
        value = (a * f).sum() + (b * g).sum()
    # The value is that of the dual, the gradient that of the plan's cost with the plan held fixed.
    return value + (plan * (cost - cost.detach())).sum()
