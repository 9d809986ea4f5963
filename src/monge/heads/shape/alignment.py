"""Optimal transport from predicted to true states: maps that a head applies, and a divergence to train with.

Costs are squared Euclidean distances; entropies are in the units of the cost.
"""

from abc import ABC, abstractmethod
from typing import Final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from monge.core.errors import OptionError
from monge.core.registry import Registry

Points = Float[Tensor, "nodes size"]


class Alignment(nn.Module, ABC):
    """A map of predicted states of width `size`, fitted on pairs of predicted and true states."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @abstractmethod
    def fit(self, predicted: Points, true: Points) -> None:
        """Fit the map; row i of `predicted` predicts row i of `true`."""

    @abstractmethod
    def map(self, states: Points) -> Points:
        """The aligned states."""


class NoMap(Alignment):
    """Predictions stay as they are."""

    def fit(self, predicted: Points, true: Points) -> None:
        del predicted, true

    def map(self, states: Points) -> Points:
        return states


class GaussianMap(Alignment):
    """The optimal transport map, under squared Euclidean cost, from the law of predictions to that of true states.

    Both laws are modelled as Gaussian, N(mu', S') and N(mu, S):

        map(z) = mu + A (z - mu'),  A = S'^(-1/2) (S'^(1/2) S S'^(1/2))^(1/2) S'^(-1/2)

    A is symmetric and positive definite, so this is the gradient of a convex function and hence
    optimal (Brenier). It restores the scale and the correlations that regression shrinks. It does not
    correct single predictions.

    Args:
        diagonal: Added to both covariances, in units of their mean variance, for directions without
            variance; with 0, mean and covariance match exactly.

    Reference:
        Dowson and Landau, 1982; Takatsu, 2011; Peyre and Cuturi, Computational Optimal Transport,
        arXiv 1803.00567, remark 2.31.
    """

    matrix: Tensor
    shift: Tensor

    def __init__(self, size: int, diagonal: float | int = 1e-4) -> None:
        super().__init__(size)
        self.diagonal = float(diagonal)
        self.register_buffer("matrix", torch.eye(size))
        self.register_buffer("shift", torch.zeros(size))

    def fit(self, predicted: Points, true: Points) -> None:
        mean_from, cov_from = _moments(predicted, self.diagonal)
        mean_to, cov_to = _moments(true, self.diagonal)
        matrix = monge_matrix(cov_from, cov_to)
        self.matrix.copy_(matrix)
        self.shift.copy_(mean_to - matrix @ mean_from)

    def map(self, states: Points) -> Points:
        return states @ self.matrix.T + self.shift


def monge_matrix(
    cov_from: Float64[Tensor, "size size"], cov_to: Float64[Tensor, "size size"]
) -> Float64[Tensor, "size size"]:
    """The symmetric A with A S' A = S.

    Raises:
        OptionError: If the first covariance is singular.
    """
    values, vectors = torch.linalg.eigh(cov_from)
    if not float(values[0]) > 0.0:
        raise OptionError(
            "gaussian alignment: the predictions have no variance in some direction; give more "
            "text or a diagonal"
        )
    root = (vectors * values.sqrt()) @ vectors.T
    inverse = (vectors / values.sqrt()) @ vectors.T
    middle, basis = torch.linalg.eigh(root @ cov_to @ root)
    return inverse @ ((basis * middle.clamp_min(0.0).sqrt()) @ basis.T) @ inverse


def _moments(
    states: Tensor, diagonal: float
) -> tuple[Float64[Tensor, " size"], Float64[Tensor, "size size"]]:
    wide = states.double()
    mean = wide.mean(dim=0)
    centred = wide - mean
    covariance = centred.T @ centred / len(wide)
    ridge = torch.full_like(mean, diagonal * float(covariance.diagonal().mean()))
    return mean, covariance + torch.diag(ridge)


class SinkhornAnchors(Alignment):
    """The barycentric projection of an entropic plan from the predictions onto anchors.

    The anchors are centres of clusters of true states, weighted by the clusters' masses. The
    image of a state depends on the other states of the batch, and so do a request's draft laws.
    Decoding stays lossless, since the declared law is the law that tokens are drawn from, but text
    is not reproducible. This arm exists for ablations.

    Args:
        num_anchors: Number of clusters.
        blur: Entropy, in units of the mean cost.
        num_iterations: Sinkhorn iterations per call.

    Reference:
        The literal reading of SHAPE's "lightweight Sinkhorn iterations" (OpenReview FEttCBv3Ny);
        barycentric projection as in Courty et al., arXiv 1507.00504.
    """

    anchors: Tensor
    masses: Tensor

    def __init__(
        self, size: int, num_anchors: int = 256, blur: float | int = 0.05, num_iterations: int = 3
    ) -> None:
        super().__init__(size)
        self.blur, self.num_iterations = float(blur), num_iterations
        self.register_buffer("anchors", torch.zeros(num_anchors, size))
        self.register_buffer("masses", torch.full((num_anchors,), 1.0 / num_anchors))

    def fit(self, predicted: Points, true: Points) -> None:
        del predicted
        if len(true) < len(self.anchors):
            raise OptionError(
                f"sinkhorn alignment: {len(self.anchors)} anchors need as many "
                f"states; got {len(true)}"
            )
        centres, masses = k_means(true.to(self.anchors.dtype), len(self.anchors))
        self.anchors.copy_(centres)
        self.masses.copy_(masses)

    def map(self, states: Points) -> Points:
        if not len(states):
            return states
        cost = squared_distances(states, self.anchors)
        uniform = torch.full_like(states[:, 0], 1.0 / len(states))
        entropy = self.blur * mean_cost(cost)
        plan = log_plan(cost, uniform, self.masses, entropy, self.num_iterations)
        return torch.softmax(plan, dim=1) @ self.anchors


def k_means(
    states: Float[Tensor, "nodes size"], num_clusters: int, num_iterations: int = 10
) -> tuple[Float[Tensor, "clusters size"], Float[Tensor, " clusters"]]:
    """Centres and masses of Lloyd's iterations, from evenly spaced rows.

    An empty cluster keeps its centre and has no mass.
    """
    centres = states[torch.arange(num_clusters, device=states.device) * len(states) // num_clusters]
    counts = torch.zeros_like(centres[:, 0])
    for _ in range(num_iterations):
        nearest = squared_distances(states, centres).argmin(dim=1)
        counts = torch.bincount(nearest, minlength=num_clusters).to(states.dtype)
        sums = torch.zeros_like(centres).index_add_(0, nearest, states)
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1.0)[:, None], centres)
    return centres, counts / len(states)


ALIGNMENTS: Final[Registry[Alignment]] = Registry(
    "alignment",
    {"none": NoMap, "gaussian": GaussianMap, "sinkhorn_anchors": SinkhornAnchors},
)


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
    """Dual potentials after `num_iterations` Sinkhorn iterations from zero; the right potentials are updated last."""
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

    Reference:
        Feydy et al., arXiv 1810.08278.
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
