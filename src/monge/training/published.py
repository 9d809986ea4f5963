"""Medusa and EAGLE heads, trained with the text, losses and loop of SHAPE heads.

They are saved in their published formats.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from jaxtyping import Int64
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import unknown_name
from monge.heads.target import TargetSizes
from monge.training.eagle import EagleTrainee
from monge.training.loop import NOBODY, Outcome, Recipe, Watch, rounded, train
from monge.training.medusa import MedusaTrainee
from monge.training.shape.run import HELD_OUT_ROWS, feature_model, gradient_ends, thirds
from monge.training.texts import read_texts

KINDS: Final = ("medusa", "eagle")


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
) -> Outcome:
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
    progress = train(trainee, recipe, folder, watch)
    size = sum(tensor.numel() for tensor in trainee.weights.values())
    if watch.should_stop():
        return Outcome(num_parameters=size, quality=None, progress=progress)
    quality = trainee.quality(held_out)
    figures = {"tokens": rows.numel(), **progress.figures, "held_out": asdict(quality)}
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    config = {**trainee.config, "about": figures | (about or {})}
    save_published(folder, file, rounded(trainee.weights), config)
    return Outcome(num_parameters=size, quality=quality, progress=progress)


def save_published(
    folder: Path, file: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Save a head in a published format."""
    save_file(dict(tensors), folder / file)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
