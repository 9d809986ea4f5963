"""Maps from the law of predicted states to the law of true states."""

from abc import ABC, abstractmethod
from typing import Final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from monge.core.errors import OptionError
from monge.core.registry import Registry
from monge.heads.shape.sinkhorn import log_plan, mean_cost, squared_distances

Points = Float[Tensor, "nodes size"]

DEFAULT_DIAGONAL: Final = 1e-4
"""Added to both covariances, in units of their mean variance, for directions without variance."""


class Alignment(nn.Module, ABC):
    """A map of predicted states, fitted on pairs of predicted and true states.

    Args:
        size: Width of a state.
    """

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
        size: Width of a state.
        diagonal: See `DEFAULT_DIAGONAL`; with 0, mean and covariance match exactly.

    Reference:
        Dowson and Landau, 1982; Takatsu, 2011; Peyre and Cuturi, Computational Optimal Transport,
        arXiv 1803.00567, remark 2.31.
    """

    matrix: Tensor
    shift: Tensor

    def __init__(self, size: int, diagonal: float | int = DEFAULT_DIAGONAL) -> None:
        super().__init__(size)
        if not diagonal >= 0.0:
            raise OptionError(f"gaussian alignment: diagonal must be at least 0; got {diagonal}")
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
        size: Width of a state.
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
        if num_anchors < 1 or num_iterations < 1 or not blur > 0.0:
            raise OptionError(
                "sinkhorn alignment: need num_anchors >= 1, num_iterations >= 1 and blur > 0; got "
                f"{num_anchors}, {num_iterations} and {blur}"
            )
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
