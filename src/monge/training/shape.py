"""`monge train shape`: from a target and some text to a head on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import unknown_name
from monge.heads.shape.checkpoint import save_head
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.networks.base import FeatureModel
from monge.options import option
from monge.training.calibrate import (
    calibrate_alignments,
    calibrate_ridge,
    drafted_steps,
    measure,
    principal_directions,
)
from monge.training.chain import chain_loss
from monge.training.loop import NOBODY, TRAINING, Outcome, Progress, Recipe, Watch, train
from monge.training.own_text import digest_of
from monge.training.texts import (
    HELD_OUT_ROWS,
    Ends,
    Text,
    Texts,
    feature_model,
    gradient_ends,
    random_windows,
    read_texts,
    thirds,
)

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "ridge": {"kind": "ridge", "is_branched": True},
    "paper": {"kind": "gated", "is_branched": False},
    "branch": {"kind": "gated", "is_branched": True},
}
_SUBSPACE: Final = 64
_SUBSPACE_STATES: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Settings of a head, which are options of `monge train shape`.

    Args:
        preset: `ridge` (no training), `paper` (gated, blind) or `branch` (gated, branched).
        num_steps: Number of steps.
        width: Rank of a gated predictor's residual; `None` takes the target's hidden size, at most
            1024.
        alignment: `none`, `gaussian` or `sinkhorn_anchors`; fitted after the predictor.
        recipe: Training settings of a gated predictor.

    Raises:
        OptionError: If the preset is unknown.
    """

    preset: str = option("branch", TRAINING, "ridge (no training), paper, branch.")
    alignment: str = option("gaussian", TRAINING, "none, gaussian, sinkhorn_anchors.")
    num_steps: int = option(3, TRAINING, "Steps that are predicted.")
    width: int | None = option(
        None,
        TRAINING,
        "Rank of a step's residual.",
        "the hidden size, at most 1024",
        kind=int,
    )
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)


def train_predictor(
    head: ShapeHead,
    fitted: Texts,
    held_out: Texts,
    ends: Ends,
    *,
    recipe: Recipe,
    folder: Path,
    identity: Mapping[str, Any],
    watch: Watch = NOBODY,
    mixed: torch.dtype | None = None,
) -> Progress:
    """Train the predictor of a head in place.

    Args:
        head: The head.
        fitted: Training text and states.
        held_out: Held-out text and states, for early stopping.
        ends: The target's embedding and output layer.
        recipe: Settings of the training.
        folder: Folder of the checkpoint; an interrupted run continues from there.
        identity: As for `train`.
        watch: Callbacks.
        mixed: Autocast type of the predictor; `None` disables autocast.
    """
    some = fitted.states[:_SUBSPACE_STATES]
    subspace = principal_directions(some.float(), min(_SUBSPACE, some.shape[1]))
    num_steps = head.predictor.num_steps

    def loss(generator: torch.Generator, share: float) -> Tensor:
        del share
        windows = random_windows(fitted, recipe.batch_size, num_steps, ends, generator)
        with torch.autocast(subspace.device.type, dtype=mixed, enabled=mixed is not None):
            steps = drafted_steps(head, windows, ends)
            return chain_loss(steps, recipe.weights, subspace=subspace)

    def efficiency() -> float:
        return measure(head, held_out, ends).block_efficiency

    return train(
        dict(head.predictor.named_parameters()),
        loss,
        efficiency,
        recipe=recipe,
        folder=folder,
        identity=identity,
        watch=watch,
    )


def make_head(
    network: PreTrainedModel,
    rows: Sequence[Text],
    settings: HeadSettings,
    folder: Path,
    *,
    watch: Watch = NOBODY,
    mixed: torch.dtype | None = None,
    about: Mapping[str, Any] | None = None,
) -> Outcome:
    """Read the rows with the target, fit or train a head, and save it.

    Args:
        network: The target.
        rows: Text that the target wrote.
        settings: Settings of the head.
        folder: Folder of the head and of the checkpoint.
        watch: Callbacks.
        mixed: Autocast type; `None` disables autocast.
        about: Further entries of the saved configuration.
    """
    target, ends = feature_model(network), gradient_ends(network)
    texts = read_texts(target, rows, on_rows=watch.on_read)
    fitted, chosen, held_out = thirds(texts)
    head = _fresh(target, settings, network.device)
    began = perf_counter()
    if settings.preset == "ridge":
        calibrate_ridge(head, fitted, chosen, ends)
        progress = Progress(seconds=perf_counter() - began)
    else:
        progress = train_predictor(
            head,
            fitted,
            chosen.part(0, HELD_OUT_ROWS),
            ends,
            recipe=settings.recipe,
            folder=folder,
            identity={
                "target": digest_of(network),
                "text": fitted.digest,
                "preset": settings.preset,
                "num_steps": settings.num_steps,
                "width": settings.width,
            },
            watch=watch,
            mixed=mixed,
        )
        if watch.should_stop():
            return Outcome(num_parameters=head.num_parameters, quality=None, progress=progress)
        calibrate_alignments(head, fitted, chosen, ends)
    quality = measure(head, held_out, ends)
    outcome = Outcome(num_parameters=head.num_parameters, quality=quality, progress=progress)
    figures = {"settings": asdict(settings), "tokens": len(texts.token_ids), **outcome.figures}
    # Rounding to bfloat16 changes a draft law slightly and the output law not at all.
    save_head(head, folder, dtype=torch.bfloat16, about={**figures, **(about or {})})
    return outcome


def _fresh(target: FeatureModel, settings: HeadSettings, device: torch.device) -> ShapeHead:
    sizes, options = TargetSizes.of(target), dict(PRESETS[settings.preset])
    kind = options.pop("kind")
    if kind == "gated":
        options["width"] = settings.width or min(1024, sizes.hidden_size)
        options["gate_rank"] = min(64, max(1, sizes.hidden_size // 8))
    generator = torch.Generator().manual_seed(settings.recipe.seed)
    predictor = make_predictor(kind, sizes, generator, num_steps=settings.num_steps, **options)
    head = ShapeHead(predictor, sizes, settings.alignment)
    head.remember(target)
    return head.to(device)
