"""K-SEQ at many nodes at once. The plain twin is `verify/k_seq.py`."""

import torch
from jaxtyping import Float64
from torch import Tensor

from monge.verify.fast.trials import Outcome, Trials


def k_seq(trials: Trials) -> Outcome:
    """One scaled ratio for every draw; see `verify/k_seq.py`."""
    is_tried = trials.columns >= 0
    width = is_tried.sum(1, keepdim=True).to(torch.float64)
    rho = _divisors(trials, width)
    taken = (trials.p / rho).minimum(trials.q)
    at = trials.columns.clamp_min(0)
    is_hit = is_tried & (trials.uniforms < taken.gather(1, at) / trials.q.gather(1, at))
    # argmax finds the first of equal values
    winners = torch.where(is_hit.any(1), is_hit.to(torch.int8).argmax(1), -1)
    left = (trials.p - _gammas(trials, width, rho) * taken).clamp_min(0.0)
    return Outcome(winners=winners, left=left)


def _divisors(trials: Trials, width: Float64[Tensor, "nodes 1"]) -> Float64[Tensor, "nodes 1"]:
    """The smallest rho in [1, K] that is not below its gamma.

    Bisection until no float lies between.
    """
    low, high = torch.ones_like(width), width.clone()
    high = torch.where(_gammas(trials, width, low) <= low, low, high)
    while True:
        rho = 0.5 * (low + high)
        is_between = (low < rho) & (rho < high)
        if not bool(is_between.any()):
            return high
        is_enough = _gammas(trials, width, rho) <= rho
        high = torch.where(is_between & is_enough, rho, high)
        low = torch.where(is_between & ~is_enough, rho, low)


def _gammas(trials: Trials, width: Tensor, rho: Tensor) -> Float64[Tensor, "nodes 1"]:
    beta = (trials.p / rho).minimum(trials.q).sum(1, keepdim=True).clamp_max(1.0)
    gamma = -torch.expm1(width * torch.log1p(-beta)) / beta
    return torch.where((beta > 0.0) & (beta < 1.0), gamma, 1.0)  # disjoint supports, or p equals q
