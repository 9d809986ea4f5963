"""The Monge map between two Gaussian laws, in closed form."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from monge.core.errors import OptionError
from monge.heads.shape.alignment.base import Alignment

DEFAULT_DIAGONAL = 1e-4
"""Added to both covariances, in units of their mean variance.

Directions without variance get a map all the same.
"""


class GaussianMap(Alignment):
    """The optimal transport map, under squared Euclidean cost, from the law of the predictions to that of the true states.

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

    def fit(
        self, predicted: Float[Tensor, "nodes size"], true: Float[Tensor, "nodes size"]
    ) -> None:
        mean_from, cov_from = _moments(predicted, self.diagonal)
        mean_to, cov_to = _moments(true, self.diagonal)
        matrix = monge_matrix(cov_from, cov_to)
        self.matrix.copy_(matrix)
        self.shift.copy_(mean_to - matrix @ mean_from)

    def map(self, states: Float[Tensor, "nodes size"]) -> Float[Tensor, "nodes size"]:
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
    ridge = diagonal * float(covariance.diagonal().mean())
    return mean, covariance + ridge * torch.eye(
        len(mean), dtype=torch.float64, device=states.device
    )
