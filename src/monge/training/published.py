"""Medusa and EAGLE heads, trained with the text, losses and loop of SHAPE heads.

They are saved in their published formats.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from jaxtyping import Int64
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import unknown_name
from monge.heads.target import TargetSizes
from monge.training.chain import ChainQuality
from monge.training.eagle import EagleTrainee
from monge.training.loop import Progress, Recipe, train
from monge.training.medusa import MedusaTrainee
from monge.training.shape.run import (
    HELD_OUT_ROWS,
    NOBODY,
    Watch,
    feature_model,
    gradient_ends,
    thirds,
    training_figures,
)
from monge.training.texts import read_texts

KINDS: Final = ("medusa", "eagle")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOutcome:
    """A trained head and its acceptance on held-out text, `None` if training was interrupted."""

    num_parameters: int
    quality: ChainQuality | None
    progress: Progress


def train_published(
    kind: str,
    network: PreTrainedModel,
    rows: Int64[Tensor, "rows seq"],
    folder: Path,
    *,
    recipe: Recipe,
    num_steps: int = 3,
    watch: Watch = NOBODY,
    about: dict[str, Any] | None = None,
) -> PublishedOutcome:
    """Read the rows with the target, train a head, and save it in the published format.

    Args:
        kind: `medusa` or `eagle`.
        network: The target.
        rows: Text that the target wrote.
        folder: Folder of the head and of the checkpoint.
        recipe: Settings of the training; the Sinkhorn term is not used.
        num_steps: Number of Medusa heads, or length of EAGLE's training chains.
        watch: Receives progress.
        about: Further entries of the saved configuration.

    Raises:
        OptionError: If the kind is unknown, or there is too little text.
        ModelLoadError: If the checkpoint of an earlier run cannot be read.
    """
    if kind not in KINDS:
        raise unknown_name("kind of head", kind, KINDS)
    target, ends = feature_model(network), gradient_ends(network)
    fitted, chosen, held_out = thirds(read_texts(target, rows, on_rows=watch.on_read))
    look = chosen.rows(slice(0, HELD_OUT_ROWS))
    common: dict[str, Any] = {
        "fitted": fitted,
        "held_out": look,
        "ends": ends,
        "parts": recipe.weights,
        "num_steps": num_steps,
    }
    if kind == "medusa":
        trainee: MedusaTrainee | EagleTrainee = MedusaTrainee(**common)
    else:
        trainee = EagleTrainee(
            **common, config=layer_config(network, TargetSizes.of(target)), seed=recipe.seed
        )
    progress = train(
        trainee,
        recipe,
        folder,
        on_step=watch.on_step,
        should_stop=watch.should_stop,
        clock=perf_counter,
    )
    size = sum(tensor.numel() for tensor in trainee.weights.values())
    if watch.should_stop():
        return PublishedOutcome(num_parameters=size, quality=None, progress=progress)
    quality = trainee.quality(held_out)
    figures = {"tokens": rows.numel(), **training_figures(progress), "held_out": asdict(quality)}
    config = {**trainee.config, "about": figures | (about or {})}
    # Rounding to bfloat16 moves a draft law a little and the output law not at all.
    tensors = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in trainee.weights.items()
    }
    save_file(
        tensors,
        folder / ("medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"),
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return PublishedOutcome(num_parameters=size, quality=quality, progress=progress)


def layer_config(network: PreTrainedModel, sizes: TargetSizes) -> dict[str, Any]:
    """Configuration of a Llama layer of the target's size."""
    config = network.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or max(1, sizes.hidden_size // 64))
    dim = int(getattr(config, "head_dim", None) or sizes.hidden_size // heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": dim,
        "intermediate_size": int(
            getattr(config, "intermediate_size", None) or 4 * sizes.hidden_size
        ),
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "bias": False,
    }
