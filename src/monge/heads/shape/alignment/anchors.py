"""Run-time Sinkhorn: entropic transport of the predictions onto anchor states, at every draft."""

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OptionError
from monge.heads.shape.alignment.base import Alignment
from monge.heads.shape.sinkhorn import log_plan, mean_cost, squared_distances


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

    def fit(
        self, predicted: Float[Tensor, "nodes size"], true: Float[Tensor, "nodes size"]
    ) -> None:
        del predicted
        if len(true) < len(self.anchors):
            raise OptionError(
                f"sinkhorn alignment: {len(self.anchors)} anchors need as many "
                f"states; got {len(true)}"
            )
        centres, masses = k_means(true.to(self.anchors.dtype), len(self.anchors))
        self.anchors.copy_(centres)
        self.masses.copy_(masses)

    def map(self, states: Float[Tensor, "nodes size"]) -> Float[Tensor, "nodes size"]:
        if not len(states):
            return states
        cost = squared_distances(states, self.anchors)
        uniform = torch.full(
            (len(states),), 1.0 / len(states), dtype=states.dtype, device=states.device
        )
        plan = log_plan(
            cost, uniform, self.masses, self.blur * mean_cost(cost), self.num_iterations
        )
        return torch.softmax(plan, dim=1) @ self.anchors


def k_means(
    states: Float[Tensor, "nodes size"], num_clusters: int, num_iterations: int = 10
) -> tuple[Float[Tensor, "clusters size"], Float[Tensor, " clusters"]]:
    """Centres and masses of Lloyd's iterations, from evenly spaced rows.

    An empty cluster keeps its centre and has no mass.
    """
    centres = states[torch.arange(num_clusters, device=states.device) * len(states) // num_clusters]
    counts = torch.zeros(num_clusters, dtype=states.dtype, device=states.device)
    for _ in range(num_iterations):
        nearest = squared_distances(states, centres).argmin(dim=1)
        counts = torch.bincount(nearest, minlength=num_clusters).to(states.dtype)
        sums = torch.zeros_like(centres).index_add_(0, nearest, states)
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1.0)[:, None], centres)
    return centres, counts / len(states)
