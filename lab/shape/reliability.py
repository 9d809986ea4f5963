"""Distance between the confidence of a head in its most probable token and the target's mass of it."""

from collections.abc import Sequence
from typing import Final

import torch

from monge.heads.shape.head import ShapeHead
from monge.training.calibrate import law, predictions
from monge.training.texts import Ends, Texts, all_windows

BINS: Final = 10


@torch.inference_mode()
def reliability(head: ShapeHead, texts: Texts, ends: Ends) -> list[list[tuple[float, float, int]]]:
    """Bins of confidence, by step: mean confidence, mean mass under the target, positions."""
    said: list[list[torch.Tensor]] = [[] for _ in range(head.predictor.num_steps)]
    was: list[list[torch.Tensor]] = [[] for _ in range(head.predictor.num_steps)]
    for windows in all_windows(texts, head.predictor.num_steps, ends):
        for index, state in enumerate(predictions(head, windows)):
            q = law(head.cooled(index + 1, ends.unembed(state)).double())
            p = law(ends.unembed(windows.true[:, index]).double())
            top = q.argmax(dim=1, keepdim=True)
            said[index].append(q.gather(1, top).squeeze(1))
            was[index].append(p.gather(1, top).squeeze(1))
    return [_bins(torch.cat(one), torch.cat(other)) for one, other in zip(said, was, strict=True)]


def expected_error(bins: Sequence[tuple[float, float, int]]) -> float:
    """Mean distance of what was said and what was, weighted by positions."""
    return sum(abs(said - was) * count for said, was, count in bins) / sum(
        count for *_, count in bins
    )


def _bins(said: torch.Tensor, was: torch.Tensor) -> list[tuple[float, float, int]]:
    places = (said * BINS).long().clamp(max=BINS - 1)
    chosen = [places == place for place in range(BINS)]
    return [
        (float(said[one].mean()), float(was[one].mean()), int(one.sum()))
        for one in chosen
        if bool(one.any())
    ]
