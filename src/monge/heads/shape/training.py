"""Training of a SHAPE head, through the loop that all heads share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from monge.core.errors import OptionError
from monge.heads.shape.calibrate import principal_directions
from monge.heads.shape.head import ShapeHead
from monge.heads.shape.losses import head_loss
from monge.heads.shape.measure import measure
from monge.heads.training import loop
from monge.heads.training.loop import Progress, Recipe, Trainee
from monge.heads.training.texts import Ends, Texts, num_windows, windows_at

_SUBSPACE: Final = 64
_SUBSPACE_STATES: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is trained on what.

    Args:
        head: Trained in place; its predictor only.
        fitted: Text and states to fit.
        held_out: Text and states that decide when it ends, and which step is kept.
        ends: The target's ends, with gradients.
        recipe: How.
        folder: Where the state is kept; a run that was interrupted goes on from there.
        mixed: Type of the predictor's arithmetic under autocast; `None` for none.
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
    """Train, or go on; see `monge.heads.training.loop.train`.

    Raises:
        OptionError: If there is too little text, the predictor is not one that is trained, or the
            folder holds a run with another recipe.
        ModelLoadError: If the state cannot be read.
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
