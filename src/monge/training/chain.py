"""Drafted chains along text that the target wrote: their acceptance, and their training loss.

In the maths p = target, q = draft. A drafted token is accepted with probability sum_v min(p_v, q_v)
= 1 - TV(p, q).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from monge.core.errors import OptionError
from monge.heads.shape.alignment import sinkhorn_divergence


@dataclass(frozen=True, slots=True)
class Step:
    """A step of many chains.

    Args:
        drafted: Logits of the head.
        true: Logits of the target at the same places, for the same tokens.
        token_ids: Tokens that the target wrote there, numbered as the logits; -1 for a token that
            is never drafted.
        log_z: Log-sum-exp of all of the target's logits, if `true` lacks some.
        states: States that the head predicted, and the target's own, for losses on states.
    """

    drafted: Float[Tensor, "nodes vocab"]
    true: Float[Tensor, "nodes vocab"]
    token_ids: Int64[Tensor, " nodes"]
    log_z: Float[Tensor, " nodes"] | None = None
    states: tuple[Float[Tensor, "*nodes hidden"], Float[Tensor, "*nodes hidden"]] | None = None

    @property
    def target(self) -> Float[Tensor, "nodes vocab"]:
        """Masses of the target."""
        wide = self.true.double()
        return wide.softmax(dim=1) if self.log_z is None else (wide - self.log_z[:, None]).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainQuality:
    """Acceptance of a head, a number for each step.

    Args:
        acceptance: Mean of sum_v min(p, q): the probability that a drafted token is accepted,
            given the text as its prefix.
        survival: Probability that a sampled chain is accepted up to and with this step.
    """

    acceptance: tuple[float, ...]
    survival: tuple[float, ...]

    @property
    def block_efficiency(self) -> float:
        """Tokens per target forward of a sampled chain of all steps, verified at the text's temperature."""
        return 1.0 + sum(self.survival)


@torch.no_grad()
def chain_quality(batches: Iterable[Iterable[Step]]) -> ChainQuality:
    """Mean acceptance of chains; unbiased if the target wrote the text.

    The survival of a chain is the mean of prod_(j<n) min(1, q_j(x_j) / p_j(x_j)) times sum_v
    min(p_n, q_n) over texts x drawn from p: a prefix is drafted and accepted with probability prod
    min(p, q), and drawing it from p divides by prod p.

    Args:
        batches: The steps of each batch of chains, in order; all steps of a batch have the same
            rows.
    """
    acceptance: list[float] = []
    survival: list[float] = []
    count = 0
    for steps in batches:
        kept = None
        for number, step in enumerate(steps):
            p, q = step.target, step.drafted.double().softmax(dim=1)
            agreed = torch.minimum(p, q).sum(dim=1)
            kept = torch.ones_like(agreed) if kept is None else kept
            if number == len(acceptance):
                acceptance.append(0.0)
                survival.append(0.0)
            acceptance[number] += float(agreed.sum())
            survival[number] += float((kept * agreed).sum())
            place = step.token_ids.clamp_min(0)[:, None]
            ratio = (q.gather(1, place) / p.gather(1, place))[:, 0].clamp_max(1.0)
            kept = kept * torch.where(step.token_ids < 0, 0.0, ratio)
        count += 0 if kept is None else len(kept)
    return ChainQuality(
        acceptance=tuple(value / count for value in acceptance),
        survival=tuple(value / count for value in survival),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the loss terms.

        sum_n decay^(n-1) [ KL(p || q_n) + tv TV(p, q_n) + cosine (1 - cos(h'_n, h_n)) + sinkhorn
        S(h'_n, h_n) ]

    Args:
        tv: Weight of the rejection probability.
        cosine: Weight of the angle between predicted and true state.
        sinkhorn: Weight of the debiased Sinkhorn divergence between the two clouds of a batch, in a
            subspace. It regularises the law of the predictions.
        decay: Weight of a step relative to the previous step.

    Raises:
        OptionError: If a weight is negative.
    """

    tv: float = 0.5
    cosine: float = 0.1
    sinkhorn: float = 0.05
    decay: float = 0.8

    def __post_init__(self) -> None:
        if min(self.tv, self.cosine, self.sinkhorn, self.decay) < 0:
            raise OptionError(f"head training: weights must be at least 0; got {self}")


def chain_loss(
    steps: Iterable[Step],
    weights: Weights,
    *,
    subspace: Float[Tensor, "size hidden"] | None = None,
) -> Float[Tensor, ""]:
    """Mean loss of a batch of chains.

    Args:
        steps: The steps; gradients flow through `drafted` and the predicted states.
        weights: Weights of the loss terms.
        subspace: Directions in which the Sinkhorn term compares the clouds; `None` leaves it out.
    """
    total: Tensor | None = None
    for number, step in enumerate(steps):
        log_p, log_q = step.true.float().log_softmax(dim=1), step.drafted.float().log_softmax(dim=1)
        p = log_p.exp()
        # A token without mass is minus infinity in the logarithm and counts nothing.
        kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1).mean()
        tv = 1.0 - torch.minimum(p, log_q.exp()).sum(dim=1).mean()
        loss = kl + weights.tv * tv
        if step.states is not None:
            predicted, true = (states.float() for states in step.states)
            if weights.cosine > 0:
                angle = 1.0 - functional.cosine_similarity(predicted, true, dim=-1).mean()
                loss = loss + weights.cosine * angle
            if subspace is not None and weights.sinkhorn > 0:
                clouds = (predicted @ subspace.T, true @ subspace.T)
                loss = loss + weights.sinkhorn * sinkhorn_divergence(*clouds)
        loss = weights.decay**number * loss
        total = loss if total is None else total + loss
    assert total is not None
    return total
