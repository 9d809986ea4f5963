"""How good a head is on text that the target wrote.

In the maths p = target, q = draft.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from monge.heads.shape.head import ShapeHead
from monge.heads.training.texts import Ends, Texts, Windows, all_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Figures of a head, one number per step.

    Args:
        acceptance: Mean of sum_v min(p, q): how often a drafted token is accepted whose prefix is
            the text's.
        survival: Probability that a sampled chain is accepted up to and with this step.
        top_hits: How often the target's own token is among the `width` most probable drafted ones.
        cosine: Mean cosine of predicted and true states.
        num_windows: Positions measured.
    """

    acceptance: tuple[float, ...]
    survival: tuple[float, ...]
    top_hits: tuple[float, ...]
    cosine: tuple[float, ...]
    num_windows: int

    @property
    def block_efficiency(self) -> float:
        """Tokens per target forward of a sampled chain of all steps, verified token by token at the text's temperature."""
        return 1.0 + sum(self.survival)


def predictions(head: ShapeHead, windows: Windows) -> Iterator[Float[Tensor, "nodes hidden"]]:
    """Predicted states of step after step along the text, aligned; each feeds the next."""
    start = head.predictor.start(windows.states, windows.tokens[:, 0])
    state = windows.states
    for index in range(head.predictor.num_steps):
        state = head.step(index + 1, start, state, windows.tokens[:, index])
        yield state


@torch.inference_mode()
def measure(
    head: ShapeHead, texts: Texts, ends: Ends, *, temperature: float | int = 1.0, width: int = 4
) -> Quality:
    """Figures along text; exact in expectation where the target wrote it at this temperature.

    The survival of a chain is the mean of prod_(j<n) min(1, q_j(x_j) / p_j(x_j)) times sum_v
    min(p_n, q_n) over texts x drawn from p: a prefix is drafted and accepted with probability prod
    min(p, q), and drawing it from p divides by prod p.

    Args:
        head: The head.
        texts: Text and states.
        ends: The target's ends.
        temperature: Of both laws, above 0.
        width: Candidates counted for `top_hits`.
    """
    num_steps, device = head.predictor.num_steps, texts.states.device
    sums = torch.zeros(4, num_steps, dtype=torch.float64, device=device)
    count = 0
    for windows in all_windows(texts, num_steps, ends):
        kept = torch.ones(len(windows.states), dtype=torch.float64, device=device)
        for index, state in enumerate(predictions(head, windows)):
            true, tokens = windows.true[:, index], windows.token_ids[:, index]
            p = law(ends.unembed(true), temperature)
            q = law(head.cooled(index + 1, ends.unembed(state)), temperature)
            agreed = torch.minimum(p, q).sum(dim=1)
            sums[0, index] += agreed.sum()
            sums[1, index] += (kept * agreed).sum()
            sums[2, index] += (
                (q.topk(min(width, q.shape[1])).indices == tokens[:, None]).any(dim=1).sum()
            )
            sums[3, index] += (
                torch.nn.functional.cosine_similarity(state, true, dim=1).double().sum()
            )
            ratio = q.gather(1, tokens[:, None]) / p.gather(1, tokens[:, None])
            kept = kept * ratio[:, 0].clamp_max(1.0)
        count += len(windows.states)
    rows: Sequence[Sequence[float]] = (sums / count).tolist()
    return Quality(
        acceptance=tuple(rows[0]),
        survival=tuple(rows[1]),
        top_hits=tuple(rows[2]),
        cosine=tuple(rows[3]),
        num_windows=count,
    )


def law(
    logits: Float[Tensor, "nodes vocab"], temperature: float | int = 1.0
) -> Float[Tensor, "nodes vocab"]:
    """Masses in float32 or better, which is enough to measure with."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.softmax(wide / temperature, dim=1).double()
