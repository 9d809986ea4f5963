"""The blind-horizon ceiling: what no drafter can beat that does not see the tokens in between.

A drafter that knows the text up to x_(t+1) has one law q for the n-th step, while the target's law
p_(t+n) depends on the continuation. Its acceptance is at most C_n = max over q of E[sum_v
min(p_(t+n)(v), q(v))].
"""

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from lab.shape.heads import heads_of
from lab.shape.material import Material, Say
from monge.heads.shape.head import ShapeHead
from monge.laws.draws import SeededDraws
from monge.laws.law import DenseLaw
from monge.training.calibrate import law


def best_blind_law(laws: Float64[Tensor, "batch vocab"]) -> Float64[Tensor, " vocab"]:
    """The law q that maximises the mean of sum_v min(p(v), q(v)) over the laws p.

    The objective is concave and linear between the values that the laws take at a token: raising
    q(v) there earns the share of laws that are still above it. So mass goes to the segments of
    largest share first.
    """
    count = len(laws)
    ordered = laws.sort(dim=0).values
    # Row k: count - k laws are above.
    segments = torch.diff(ordered, dim=0, prepend=torch.zeros_like(ordered[:1]))
    best, left = torch.zeros_like(laws[0]), 1.0
    for row in range(count):
        size = float(segments[row].sum())
        if size == 0.0:
            continue
        part = min(1.0, left / size)
        best = best + part * segments[row]
        left -= part * size
        if left <= 0.0:
            break
    # The rounding of the sums is all that can be left: the segments of all rows together hold at
    # least a law's mass.
    return best / best.sum()


def acceptance(laws: Float64[Tensor, "batch vocab"], draft: Float64[Tensor, " vocab"]) -> float:
    """Mean of sum_v min(p(v), q(v))."""
    return float(torch.minimum(laws, draft).sum(dim=1).mean())


@torch.inference_mode()
def ceiling(material: Material, say: Say) -> list[dict[str, Any]]:
    """For every step: the ceiling from above and from below, the mean law's acceptance, and a blind head's at the same places.

    The best law of the continuations that it was made of overstates the ceiling; made of one half
    of them and measured on the other, and the other way round, it understates it.
    """
    settings = material.settings
    texts = material.together.held_out
    rows = torch.linspace(0, len(texts) - 1, settings.prefixes).long()
    length, starts = settings.row_length // 4, torch.tensor(texts.starts)[rows]
    prefixes = texts.token_ids[starts[:, None] + torch.arange(length)]
    say("the ceiling of blind drafters")
    laws = _rollouts(material, prefixes)  # [steps][prefixes, rollouts, vocab]
    _, head = next(heads_of(material))
    drafts = _blind_laws(material, head, texts.states[starts + length - 2], prefixes[:, -1])
    found: list[dict[str, Any]] = []
    half = settings.rollouts // 2
    for index, step in enumerate(laws):
        above = [acceptance(one, best_blind_law(one)) for one in step]
        halves = [(one[:half], one[half:]) for one in step]
        below = [
            (acceptance(a, best_blind_law(b)) + acceptance(b, best_blind_law(a))) / 2
            for a, b in halves
        ]
        found.append(
            {
                "step": index + 1,
                "ceiling_above": sum(above) / len(above),
                "ceiling_below": sum(below) / len(below),
                "mean_law": sum(acceptance(one, one.mean(dim=0)) for one in step) / len(step),
                "ridge_direct": sum(
                    acceptance(one, q) for one, q in zip(step, drafts[index], strict=True)
                )
                / len(step),
            }
        )
    return found


def _rollouts(material: Material, prefixes: Tensor) -> list[Tensor]:
    """Laws after every prefix and each of its continuations, step by step.

    The first step has no continuation yet.
    """
    settings, network = material.settings, material.network
    ids = prefixes.to(network.device)
    draws, found = SeededDraws(0), list[Tensor]()
    for number in range(settings.num_steps):
        logits = torch.cat([network(part).logits[:, -1] for part in ids.split(32)])
        laws = torch.softmax(logits.double(), dim=1).cpu()
        if number == 0:
            laws, ids = (rows.repeat_interleave(settings.rollouts, dim=0) for rows in (laws, ids))
        found.append(laws.unflatten(0, (len(prefixes), settings.rollouts)))
        tokens = [DenseLaw(one).quantile(draws.uniform()) for one in laws]
        ids = torch.cat([ids, torch.tensor(tokens, device=ids.device)[:, None]], dim=1)
    return found


def _blind_laws(
    material: Material, head: ShapeHead, states: Tensor, tokens: Tensor
) -> list[Tensor]:
    known = material.ends.embed(tokens.to(states.device)).float()
    states = states.float()
    start, found = head.predictor.start(states, known), list[Tensor]()
    for number in range(1, head.predictor.num_steps + 1):
        states = head.step(number, start, states, known)
        found.append(law(head.cooled(number, material.ends.unembed(states))).cpu())
    return found
