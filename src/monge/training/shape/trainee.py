"""Training of a SHAPE head, through the loop that all heads share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from monge.core.errors import OptionError
from monge.heads.shape.head import ShapeHead
from monge.training import loop
from monge.training.loop import Progress, Recipe, Trainee
from monge.training.shape.calibrate import principal_directions
from monge.training.shape.losses import head_loss
from monge.training.shape.measure import measure
from monge.training.texts import Ends, Texts, num_windows, windows_at

_SUBSPACE: Final = 64
_SUBSPACE_STATES: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The inputs of a training run.

    Args:
        head: The head, whose predictor is trained in place.
        fitted: Training text and states.
        held_out: Held-out text and states, for early stopping and the choice of weights.
        ends: The target's embedding and output layer, with gradients.
        recipe: Settings of the training.
        folder: Folder of the checkpoint; an interrupted run continues from there.
        mixed: Autocast type of the predictor; `None` disables autocast.
    """

    head: ShapeHead
    fitted: Texts
    held_out: Texts
    ends: Ends
    recipe: Recipe
    folder: Path
    mixed: torch.dtype | None = None


class _ShapeTrainee(Trainee):
    def __init__(self, run: Run) -> None:
        self._run = run
        some = run.fitted.states.flatten(0, 1)[:_SUBSPACE_STATES]
        self._subspace = principal_directions(some.float(), min(_SUBSPACE, some.shape[1]))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._run.head.predictor.named_parameters())

    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        run, num_steps = self._run, self._run.head.predictor.num_steps
        which = torch.randint(
            num_windows(run.fitted, num_steps), (batch_size,), generator=generator
        )
        windows = windows_at(run.fitted, which.to(run.fitted.states.device), num_steps, run.ends)
        with torch.autocast(
            self._subspace.device.type, dtype=run.mixed, enabled=run.mixed is not None
        ):
            return head_loss(run.head, windows, run.ends, run.recipe.weights, self._subspace)

    def look(self) -> float:
        return measure(self._run.head, self._run.held_out, self._run.ends).block_efficiency


def train(
    run: Run,
    *,
    on_step: Callable[[Progress], None],
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = lambda: 0.0,
) -> Progress:
    """Train, or continue; see `monge.training.loop.train`.

    Raises:
        OptionError: If there is too little text, the predictor cannot be trained, or the folder
            holds a run with another recipe.
        ModelLoadError: If the checkpoint cannot be read.
    """
    if not any(parameter.requires_grad for parameter in run.head.predictor.parameters()):
        raise OptionError(
            f"shape training: {type(run.head.predictor).__name__} is fitted in "
            "closed form, not trained"
        )
    return loop.train(
        _ShapeTrainee(run),
        run.recipe,
        run.folder,
        on_step=on_step,
        should_stop=should_stop,
        clock=clock,
    )
