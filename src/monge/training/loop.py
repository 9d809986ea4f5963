"""The training loop of all heads: reproducible batches, resumable checkpoints, and early stopping on held-out text."""

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from monge.core.errors import ModelLoadError, OptionError
from monge.options import option
from monge.training.chain import ChainQuality, Weights

STATE: Final = "training.pt"
TRAINING: Final = "Training"
"""Panel of `--help`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a training; some are options of `monge train`.

    Args:
        steps: Maximum number of steps.
        batch_size: Positions per step.
        learning_rate: Peak learning rate of AdamW without weight decay.
        warm_up: Share of the steps with a linear warm-up; a cosine decay follows.
        clip: Maximum gradient norm.
        weights: Weights of the loss terms.
        evaluate_every: Steps between evaluations on held-out text.
        patience: Evaluations without improvement after which training ends.
        seed: Seed of the batches; each step derives its own.

    Raises:
        OptionError: If a number is out of range.
    """

    steps: int = option(2000, TRAINING, "Most training steps.")
    batch_size: int = option(512, TRAINING, "Positions of a training step.", flags=("--batch",))
    learning_rate: float = option(2e-3, TRAINING, "At its peak.")
    warm_up: float = 0.04
    clip: float = 1.0
    weights: Weights = field(default_factory=Weights)
    evaluate_every: int = 100
    patience: int = 5
    seed: int = option(0, TRAINING, "Of text and training.")

    def __post_init__(self) -> None:
        sizes = (self.steps, self.batch_size, self.evaluate_every, self.patience)
        are_rates = self.learning_rate > 0 and 0 <= self.warm_up <= 1 and self.clip > 0
        if min(sizes) < 1 or not are_rates:
            raise OptionError(
                "head training: sizes must be at least 1, rates above 0 and "
                f"warm_up in [0, 1]; got {self}"
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        rising = self.warm_up * self.steps
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        share = (step - rising) / max(1.0, self.steps - rising)
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of a training.

    Args:
        step: Steps done.
        best: Largest block efficiency on held-out text so far.
        best_step: Step of the best evaluation.
        history: Step and block efficiency of every evaluation.
        loss: Loss of the last step.
        seconds: Duration in seconds, including evaluations; those of interrupted runs add up.
    """

    step: int = 0
    best: float = 0.0
    best_step: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)
    loss: float = math.nan
    seconds: float = 0.0

    @property
    def looks_since_best(self) -> int:
        """Evaluations since the best evaluation."""
        return sum(step > self.best_step for step, _ in self.history)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks of a training.

    Args:
        on_read: Receives the number of rows read.
        on_step: Receives progress.
        should_stop: Called after every step; training ends with a checkpoint if it returns true.
    """

    on_read: Callable[[int], None] = lambda count: None
    on_step: Callable[[Progress], None] = lambda progress: None
    should_stop: Callable[[], bool] = lambda: False


NOBODY: Final = Watch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trained head and its acceptance on held-out text, `None` if training was interrupted."""

    num_parameters: int
    quality: ChainQuality | None
    progress: Progress

    @property
    def figures(self) -> dict[str, Any]:
        """Entries of a saved head's configuration."""
        progress, quality = self.progress, None if self.quality is None else asdict(self.quality)
        steps = {
            "steps": progress.step,
            "best_step": progress.best_step,
            "training_s": progress.seconds,
        }
        return {**steps, "held_out": quality}


def train(
    weights: Mapping[str, Tensor],
    loss: Callable[[torch.Generator, float], Tensor],
    efficiency: Callable[[], float],
    *,
    recipe: Recipe,
    folder: Path,
    identity: Mapping[str, Any],
    watch: Watch = NOBODY,
) -> Progress:
    """Train, or continue; ends with the weights of the best evaluation.

    Args:
        weights: Weights by name, trained in place.
        loss: Loss of a random batch of about `recipe.batch_size` positions, from the source of the
            batch and the share of the training that is done.
        efficiency: Block efficiency on held-out text.
        recipe: Settings of the training.
        folder: Folder of the checkpoint; an interrupted run continues from there.
        identity: What else must be equal for a run to continue, such as the target's digest.
        watch: Callbacks.

    Raises:
        OptionError: If the folder holds a run with another recipe or identity.
        ModelLoadError: If the checkpoint cannot be read.
    """
    optimizer = torch.optim.AdamW(
        list(weights.values()), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    known = {**asdict(recipe), **identity}
    progress, best = _restored(weights, known, folder, optimizer)

    def save() -> None:
        progress.seconds = perf_counter() - began
        state = {
            "recipe": known,
            "progress": asdict(progress),
            "weights": _copies(weights),
            "best": best,
            "optimizer": optimizer.state_dict(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        # A reader never sees half a file, and an interrupt while it is written costs the last part only.
        partial = (folder / STATE).with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(folder / STATE)

    began = perf_counter() - progress.seconds
    while progress.step < recipe.steps and progress.looks_since_best < recipe.patience:
        progress.loss = _step(weights, loss, recipe, optimizer, progress.step)
        progress.step += 1
        if progress.step % recipe.evaluate_every == 0 or progress.step == recipe.steps:
            reached = efficiency()
            progress.history.append((progress.step, reached))
            if reached > progress.best:
                progress.best, progress.best_step = reached, progress.step
                best = _copies(weights)
            save()
        watch.on_step(progress)
        if watch.should_stop():
            save()
            return progress
    _set(weights, best)
    return progress


def _step(
    weights: Mapping[str, Tensor],
    loss: Callable[[torch.Generator, float], Tensor],
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> float:
    # Every step has its own seed: the step's number is all the state that the batches have.
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    value = loss(generator, step / recipe.steps)
    value.backward()
    torch.nn.utils.clip_grad_norm_(list(weights.values()), recipe.clip)
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(value.detach())


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


@torch.no_grad()
def _set(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    if values.keys() != weights.keys():
        raise KeyError(f"weights {sorted(values.keys() ^ weights.keys())}")
    for name, weight in weights.items():
        weight.copy_(values[name])


def _restored(
    weights: Mapping[str, Tensor],
    known: Mapping[str, Any],
    folder: Path,
    optimizer: torch.optim.Optimizer,
) -> tuple[Progress, dict[str, Tensor]]:
    path, device = folder / STATE, next(iter(weights.values())).device
    if not path.exists():
        return Progress(), _copies(weights)
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        kept, progress = state["recipe"], Progress(**state["progress"])
        if changed := sorted(name for name in known if kept.get(name) != known[name]):
            raise OptionError(
                f"{path} was written with other values of {changed}; restore them "
                "or choose another folder"
            )
        _set(weights, state["weights"])
        optimizer.load_state_dict(state["optimizer"])
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelLoadError(
            f"cannot go on from {str(path)!r}: {type(error).__name__}: {error}; remove it to "
            "start anew"
        ) from error
    return progress, state["best"]
