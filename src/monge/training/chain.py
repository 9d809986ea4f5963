"""Acceptance of drafted chains along text that the target wrote.

In the maths p = target, q = draft.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One step of many chains.

    Args:
        drafted: Logits of the head.
        true: Logits of the target at the same places, for the same tokens.
        token_ids: Tokens that the target wrote there, numbered as the logits; -1 for one that is
            never drafted.
        log_z: Log-sum-exp of all of the target's logits, if `true` lacks some.
    """

    drafted: Float[Tensor, "nodes vocab"]
    true: Float[Tensor, "nodes vocab"]
    token_ids: Int64[Tensor, " nodes"]
    log_z: Float[Tensor, " nodes"] | None = None

    @property
    def target(self) -> Float[Tensor, "nodes vocab"]:
        """Masses of the target."""
        wide = self.true.double()
        return wide.softmax(dim=1) if self.log_z is None else (wide - self.log_z[:, None]).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainQuality:
    """Acceptance of a head, one number per step.

    Args:
        acceptance: Mean of sum_v min(p, q): the probability that a drafted token is accepted,
            given the text as its prefix.
        survival: Probability that a sampled chain is accepted up to and with this step.
    """

    acceptance: tuple[float, ...]
    survival: tuple[float, ...]

    @property
    def block_efficiency(self) -> float:
        """Tokens per target forward of a sampled chain of all steps, verified token by token at the text's temperature."""
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
