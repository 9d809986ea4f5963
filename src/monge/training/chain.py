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
        true: Logits of the target at the same places.
        token_ids: Tokens that the target wrote there.
    """

    drafted: Float[Tensor, "nodes vocab"]
    true: Float[Tensor, "nodes vocab"]
    token_ids: Int64[Tensor, " nodes"]


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
            p, q = (torch.softmax(logits.double(), dim=1) for logits in (step.true, step.drafted))
            agreed = torch.minimum(p, q).sum(dim=1)
            kept = torch.ones_like(agreed) if kept is None else kept
            if number == len(acceptance):
                acceptance.append(0.0)
                survival.append(0.0)
            acceptance[number] += float(agreed.sum())
            survival[number] += float((kept * agreed).sum())
            ratio = q.gather(1, step.token_ids[:, None]) / p.gather(1, step.token_ids[:, None])
            kept = kept * ratio[:, 0].clamp_max(1.0)
        count += 0 if kept is None else len(kept)
    return ChainQuality(
        acceptance=tuple(value / count for value in acceptance),
        survival=tuple(value / count for value in survival),
    )
