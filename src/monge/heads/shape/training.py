"""Training of a head: batches by number, checkpoints that lose nothing, and an end where held-out text stops improving."""

import math
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from monge.core.errors import ModelLoadError, OptionError
from monge.heads.shape.calibrate import principal_directions
from monge.heads.shape.head import ShapeHead
from monge.heads.shape.losses import Weights, head_loss
from monge.heads.shape.measure import measure
from monge.heads.shape.texts import Ends, Texts, num_windows, windows_at

STATE: Final = "training.pt"
_SUBSPACE: Final = 64
_SUBSPACE_STATES: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained.

    Args:
        steps: Most steps.
        batch_size: Positions of a step.
        learning_rate: At its peak; AdamW without decay of weights.
        warm_up: Share of the steps in which it rises linearly; then it falls as a cosine.
        clip: Largest norm of a gradient.
        weights: Of the parts of the loss.
        evaluate_every: Steps between looks at held-out text.
        patience: Looks without improvement after which training ends.
        seed: Of the batches; every step derives its own.

    Raises:
        OptionError: If a number is out of range.
    """

    steps: int = 2000
    batch_size: int = 512
    learning_rate: float = 2e-3
    warm_up: float = 0.04
    clip: float = 1.0
    weights: Weights = field(default_factory=Weights)
    evaluate_every: int = 100
    patience: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (self.steps, self.batch_size, self.evaluate_every, self.patience)
        if min(sizes) < 1 or not self.learning_rate > 0 or not 0 <= self.warm_up <= 1 or not self.clip > 0:
            raise OptionError(f"shape training: sizes must be at least 1, rates above 0 and warm_up in [0, 1]; got {self}")

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        rising = self.warm_up * self.steps
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1.0, self.steps - rising)))


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a training stands.

    Args:
        step: Steps done.
        best: Largest block efficiency on held-out text so far.
        best_step: Where it was reached.
        history: Step and block efficiency of every look.
        loss: Of the last step.
    """

    step: int = 0
    best: float = 0.0
    best_step: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)
    loss: float = math.nan

    @property
    def looks_since_best(self) -> int:
        """Looks at held-out text that brought nothing new."""
        return sum(step > self.best_step for step, _ in self.history)


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


def train(run: Run, *, on_step: Callable[[Progress], None], should_stop: Callable[[], bool] = lambda: False) -> Progress:
    """Train, or go on; the head then has the weights of the best look.

    Where `should_stop` says so, it ends after the step that it is in, with everything saved that it needs to go on.

    Raises:
        OptionError: If there is too little text, or the folder holds a run with another recipe.
        ModelLoadError: If the state cannot be read.
    """
    head, recipe = run.head, run.recipe
    parameters = list(head.predictor.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise OptionError(f"shape training: {type(head.predictor).__name__} is fitted in closed form, not trained")
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    progress, best = _restored(run, optimizer)
    some = run.fitted.states.flatten(0, 1)[:_SUBSPACE_STATES]
    subspace = principal_directions(some.float(), min(_SUBSPACE, some.shape[1]))
    while progress.step < recipe.steps and progress.looks_since_best < recipe.patience:
        progress.loss = _step(run, optimizer, progress.step, subspace)
        progress.step += 1
        if progress.step % recipe.evaluate_every == 0 or progress.step == recipe.steps:
            best = _look(run, progress, best)
            _save(run, optimizer, progress, best)
        on_step(progress)
        if should_stop():
            _save(run, optimizer, progress, best)
            return progress
    head.predictor.load_state_dict(best)
    return progress


def _step(run: Run, optimizer: torch.optim.Optimizer, step: int, subspace: Tensor) -> float:
    recipe, num_steps = run.recipe, run.head.predictor.num_steps
    # Every step has its own seed: the step's number is all the state that the batches have.
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    which = torch.randint(num_windows(run.fitted, num_steps), (recipe.batch_size,), generator=generator)
    windows = windows_at(run.fitted, which.to(run.fitted.states.device), num_steps, run.ends)
    with torch.autocast(subspace.device.type, dtype=run.mixed, enabled=run.mixed is not None):
        loss = head_loss(run.head, windows, run.ends, recipe.weights, subspace)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(list(run.head.predictor.parameters()), recipe.clip)
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _look(run: Run, progress: Progress, best: dict[str, Tensor]) -> dict[str, Tensor]:
    """Measure on held-out text; returns the weights to keep."""
    reached = measure(run.head, run.held_out, run.ends).block_efficiency
    progress.history.append((progress.step, reached))
    if reached <= progress.best:
        return best
    progress.best, progress.best_step = reached, progress.step
    return {name: tensor.clone() for name, tensor in run.head.predictor.state_dict().items()}


def _save(run: Run, optimizer: torch.optim.Optimizer, progress: Progress, best: dict[str, Tensor]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / STATE
    state = {
        "recipe": asdict(run.recipe),
        "progress": asdict(progress),
        "predictor": run.head.predictor.state_dict(),
        "best": best,
        "optimizer": optimizer.state_dict(),
    }
    # A reader never sees half a file, and an interrupt while it is written costs the last part only.
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _restored(run: Run, optimizer: torch.optim.Optimizer) -> tuple[Progress, dict[str, Tensor]]:
    path = run.folder / STATE
    fresh = {name: tensor.clone() for name, tensor in run.head.predictor.state_dict().items()}
    if not path.exists():
        return Progress(), fresh
    try:
        state: dict[str, Any] = torch.load(path, map_location=run.fitted.states.device, weights_only=True)
        recipe, progress = state["recipe"], Progress(**state["progress"])
        if recipe != asdict(run.recipe):
            changed = sorted(name for name, value in asdict(run.recipe).items() if recipe.get(name) != value)
            raise OptionError(f"{path} was written with other values of {changed}; restore them or choose another folder")
        run.head.predictor.load_state_dict(state["predictor"])
        optimizer.load_state_dict(state["optimizer"])
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelLoadError(
            f"cannot go on from {str(path)!r}: {type(error).__name__}: {error}; remove it to start anew"
        ) from error
    return progress, state["best"]
