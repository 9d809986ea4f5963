"""`monge train shape`: from a target and some text to a head on disk."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import OptionError, UnsupportedModelError, unknown_name
from monge.core.model import FeatureModel
from monge.engine.loading import as_sequence_model
from monge.engine.models.network_facts import OutputLayer
from monge.heads.shape.calibrate import calibrate_alignments, calibrate_ridge
from monge.heads.shape.checkpoint import save_head
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.heads.shape.measure import measure
from monge.heads.shape.training import Run, train
from monge.heads.training.chain import ChainQuality
from monge.heads.training.loop import Progress, Recipe
from monge.heads.training.texts import Ends, Texts, read_texts

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "ridge": {"kind": "ridge", "is_branched": True},
    "paper": {"kind": "gated", "is_branched": False},
    "branch": {"kind": "gated", "is_branched": True},
}
_HELD_OUT: Final = 0.1
HELD_OUT_ROWS: Final = 16
"""Held-out rows that a look of the training measures on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Settings of a head.

    Args:
        preset: `ridge` (no training), `paper` (gated, blind) or `branch` (gated, branched).
        num_steps: Number of steps.
        width: Rank of a gated predictor's residual; `None` takes the target's hidden size, at most
            1024.
        alignment: `none`, `gaussian` or `sinkhorn_anchors`; fitted after the
            predictor.
        recipe: Training settings of a gated predictor.

    Raises:
        OptionError: If the preset is unknown.
    """

    preset: str = "branch"
    num_steps: int = 3
    width: int | None = None
    alignment: str = "gaussian"
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A head and its acceptance on held-out text, `None` if training was interrupted."""

    head: ShapeHead
    quality: ChainQuality | None
    progress: Progress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks of a training.

    Args:
        on_read: Receives the number of rows read.
        on_step: Receives progress.
        should_stop: Called after every step.
    """

    on_read: Callable[[int], None] = lambda count: None
    on_step: Callable[[Progress], None] = lambda progress: None
    should_stop: Callable[[], bool] = lambda: False


NOBODY: Final = Watch()


def feature_model(network: PreTrainedModel) -> FeatureModel:
    """Wrap a network as a target with hidden states.

    Raises:
        UnsupportedModelError: If its hidden states are not available.
    """
    model = as_sequence_model(network)
    if not isinstance(model, FeatureModel):
        raise UnsupportedModelError(
            f"{type(network).__name__} is read as {type(model).__name__}, "
            "which shows no hidden states"
        )
    return model


def gradient_ends(network: PreTrainedModel) -> Ends:
    """The frozen embedding and output layer of a network; gradients pass through them."""
    network.requires_grad_(False)
    layer: Any = network.get_input_embeddings()
    output = OutputLayer(network)
    return Ends(embed=layer, unembed=lambda states: output(states.to(network.dtype))[0])


def make_head(
    network: PreTrainedModel,
    rows: Int64[Tensor, "rows seq"],
    settings: HeadSettings,
    folder: Path,
    *,
    watch: Watch = NOBODY,
    mixed: torch.dtype | None = None,
    about: dict[str, Any] | None = None,
) -> Outcome:
    """Read the rows with the target, fit or train a head, and save it.

    Args:
        network: The target.
        rows: Text that the target wrote.
        settings: Settings of a head.
        folder: Folder of the head and of the checkpoint.
        watch: Callbacks.
        mixed: Autocast type; `None` disables autocast.
        about: Further entries of the saved configuration.
    """
    target, ends = feature_model(network), gradient_ends(network)
    fitted, chosen, held_out = thirds(read_texts(target, rows, on_rows=watch.on_read))
    head = _fresh(target, settings, network.device)
    progress, began = None, perf_counter()
    if settings.preset == "ridge":
        calibrate_ridge(head, fitted, chosen, ends)
        of_training = {"training_s": perf_counter() - began}
    else:
        look = chosen.rows(slice(0, HELD_OUT_ROWS))
        run = Run(
            head=head,
            fitted=fitted,
            held_out=look,
            ends=ends,
            recipe=settings.recipe,
            folder=folder,
            mixed=mixed,
        )
        progress = train(
            run, on_step=watch.on_step, should_stop=watch.should_stop, clock=perf_counter
        )
        if watch.should_stop():
            return Outcome(head=head, quality=None, progress=progress)
        calibrate_alignments(head, fitted, chosen, ends)
        of_training = training_figures(progress)
    quality = measure(head, held_out, ends)
    figures = {
        "settings": asdict(settings),
        "tokens": rows.numel(),
        "held_out": asdict(quality),
        **of_training,
    }
    # Rounding to bfloat16 moves a draft law a little and the output law not at all.
    save_head(head, folder, dtype=torch.bfloat16, about=figures | (about or {}))
    return Outcome(head=head, quality=quality, progress=progress)


def training_figures(progress: Progress) -> dict[str, Any]:
    """Training figures for the saved configuration."""
    return {"steps": progress.step, "best_step": progress.best_step, "training_s": progress.seconds}


def _fresh(target: FeatureModel, settings: HeadSettings, device: torch.device) -> ShapeHead:
    sizes = TargetSizes.of(target)
    shape = {
        "width": settings.width or min(1024, sizes.hidden_size),
        "gate_rank": min(64, max(1, sizes.hidden_size // 8)),
    }
    made = dict(PRESETS[settings.preset])
    generator = torch.Generator().manual_seed(settings.recipe.seed)
    kind = made.pop("kind")
    predictor = make_predictor(
        kind,
        sizes,
        generator,
        num_steps=settings.num_steps,
        **made,
        **(shape if kind == "gated" else {}),
    )
    head = ShapeHead(predictor, sizes, settings.alignment)
    head.remember(target)
    return head.to(device)


def thirds(texts: Texts) -> tuple[Texts, Texts, Texts]:
    """Split texts into training, validation and test rows.

    Raises:
        OptionError: If there are fewer than three rows.
    """
    if len(texts.token_ids) < 3:
        raise OptionError(
            "a head needs three rows of text or more, to fit, to choose and to measure; got "
            f"{len(texts.token_ids)}"
        )
    rest, held_out = texts.split(_HELD_OUT)
    fitted, chosen = rest.split(_HELD_OUT)
    return fitted, chosen, held_out
