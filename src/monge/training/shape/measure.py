"""How good a SHAPE head is on text that the target wrote."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from monge.heads.shape.head import ShapeHead
from monge.training.chain import ChainQuality, Step, chain_quality
from monge.training.texts import Ends, Texts, Windows, all_windows


def predictions(head: ShapeHead, windows: Windows) -> Iterator[Float[Tensor, "nodes hidden"]]:
    """Predicted states of step after step along the text, aligned; each feeds the next."""
    start = head.predictor.start(windows.states, windows.tokens[:, 0])
    state = windows.states
    for index in range(head.predictor.num_steps):
        state = head.step(index + 1, start, state, windows.tokens[:, index])
        yield state


@torch.inference_mode()
def measure(
    head: ShapeHead, texts: Texts, ends: Ends, *, temperature: float | int = 1.0
) -> ChainQuality:
    """Figures of the head's chains along text; exact in expectation where the target wrote it at this temperature.

    Args:
        head: The head.
        texts: Text and states.
        ends: The target's ends.
        temperature: Of both laws, above 0.
    """
    return chain_quality(
        _steps(head, windows, ends, temperature)
        for windows in all_windows(texts, head.predictor.num_steps, ends)
    )


def _steps(
    head: ShapeHead, windows: Windows, ends: Ends, temperature: float | int
) -> Iterator[Step]:
    for index, state in enumerate(predictions(head, windows)):
        yield Step(
            drafted=head.cooled(index + 1, ends.unembed(state)) / temperature,
            true=ends.unembed(windows.true[:, index]) / temperature,
            token_ids=windows.token_ids[:, index],
        )


def law(
    logits: Float[Tensor, "nodes vocab"], temperature: float | int = 1.0
) -> Float[Tensor, "nodes vocab"]:
    """Masses in float32 or better, which is enough to measure with."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.softmax(wide / temperature, dim=1).double()
