"""`monge train shape`: from a target and some text to a head on disk."""

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
from monge.engine.models.network_facts import OutputLayer
from monge.heads.shape.checkpoint import save_head
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.loading.networks import as_sequence_model
from monge.training.loop import NOBODY, Outcome, Progress, Recipe, Watch, train
from monge.training.shape.calibrate import calibrate_alignments, calibrate_ridge
from monge.training.shape.measure import measure
from monge.training.shape.trainee import ShapeTrainee
from monge.training.texts import Ends, Texts, read_texts

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
    size, began = head.num_parameters, perf_counter()
    if settings.preset == "ridge":
        calibrate_ridge(head, fitted, chosen, ends)
        progress = Progress(seconds=perf_counter() - began)
    else:
        trainee = ShapeTrainee(
            head=head,
            fitted=fitted,
            held_out=chosen.rows(slice(0, HELD_OUT_ROWS)),
            ends=ends,
            parts=settings.recipe.weights,
            mixed=mixed,
        )
        progress = train(trainee, settings.recipe, folder, watch)
        if watch.should_stop():
            return Outcome(num_parameters=size, quality=None, progress=progress)
        calibrate_alignments(head, fitted, chosen, ends)
    quality = measure(head, held_out, ends)
    figures = {
        "settings": asdict(settings),
        "tokens": rows.numel(),
        "held_out": asdict(quality),
        **progress.figures,
    }
    # Rounding to bfloat16 moves a draft law a little and the output law not at all.
    save_head(head, folder, dtype=torch.bfloat16, about=figures | (about or {}))
    return Outcome(num_parameters=head.num_parameters, quality=quality, progress=progress)


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
