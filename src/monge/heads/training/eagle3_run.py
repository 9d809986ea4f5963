"""`monge train eagle3`: from a target and prompts to a head on disk."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from monge.core.errors import OptionError, UnsupportedModelError
from monge.heads.target import TargetSizes
from monge.heads.training.answers import AnswerSettings, write_answers
from monge.heads.training.eagle3 import (
    Conversations,
    Eagle3Trainee,
    Target,
    frequent_tokens,
    published,
    read_conversations,
)
from monge.heads.training.loop import Progress, Recipe, train
from monge.heads.training.published import PublishedOutcome, layer_config
from monge.heads.training.shape import NOBODY, Watch, feature_model, training_figures

DRAFT_VOCABULARY: Final = 8192
MIN_LAYERS: Final = 5
_CHOSEN: Final = 0.04  # of the conversations, to choose weights by, and as many to measure
_LOOK: Final = 48  # conversations of a look
_MOST_CHOSEN: Final = 128


def train_eagle3(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    recipe: Recipe,
    answers: AnswerSettings,
    draft_vocabulary: int = DRAFT_VOCABULARY,
    num_steps: int = 4,
    watch: Watch = NOBODY,
    on_answers: Callable[[float], None] = lambda count: None,
    about: dict[str, Any] | None = None,
) -> PublishedOutcome:
    """Let the target answer the prompts, read the answers, train an EAGLE-3 head, and save it in the published format.

    Args:
        network: The target, a Llama-like network.
        prompts: Token ids, each up to where the answer starts.
        folder: Where the answers, the state of the training and the head go; a rerun continues
            there.
        recipe: How the head is trained.
        answers: How answers are written.
        draft_vocabulary: How many tokens the head drafts: those that the target writes most often.
        num_steps: Steps of the chains that the head is trained on.
        watch: Receives progress.
        on_answers: Receives how many answers are new.
        about: Further entries of the saved configuration.

    Raises:
        UnsupportedModelError: If the target has too few layers, or no norm before its output layer.
        OptionError: If there are too few answers.
    """
    sizes = TargetSizes.of(feature_model(network))
    if sizes.num_layers < MIN_LAYERS:
        raise UnsupportedModelError(
            f"an EAGLE-3 head fuses three layers; this target has {sizes.num_layers}"
        )
    quick = faster_copy(network)
    written = write_answers(quick, prompts, answers, folder, on_answers)
    layers = (2, sizes.num_layers // 2, sizes.num_layers - 3)
    pairs = [(one.prompt, one.answer) for one in written if len(one.answer) > num_steps]
    count = min(_MOST_CHOSEN, max(1, round(_CHOSEN * len(pairs))))
    if len(pairs) < 2 * count + 1:
        raise OptionError(
            f"training: {len(pairs)} answers are too few to fit, to choose and to "
            "measure; give more prompts"
        )

    def read(
        some: Sequence[tuple[Sequence[int], Sequence[int]]], by: PreTrainedModel = network
    ) -> Conversations:
        # A chain needs so many tokens of the target.
        return read_conversations(by, some, layers, least=num_steps + 1, on_rows=watch.on_read)

    measured, chosen, fitted = (
        read(pairs[:count]),
        read(pairs[count : 2 * count][:_LOOK]),
        read(pairs[2 * count :], quick),
    )
    ids = frequent_tokens(
        fitted.token_ids[fitted.is_learnt],
        sizes.vocab_size,
        min(draft_vocabulary, sizes.vocab_size),
    ).cpu()
    progress = Progress()
    trainee = Eagle3Trainee(
        fitted=fitted,
        held_out=chosen,
        target=_ends(network, ids),
        config=layer_config(network, sizes) | {"vocab_size": sizes.vocab_size},
        num_steps=num_steps,
        seed=recipe.seed,
        share=lambda: progress.step / recipe.steps,
        dtype=quick.dtype,
    )

    def on_step(reached: Progress) -> None:
        progress.step = reached.step
        watch.on_step(reached)

    reached = train(
        trainee, recipe, folder, on_step=on_step, should_stop=watch.should_stop, clock=perf_counter
    )
    size = sum(tensor.numel() for tensor in trainee.weights.values())
    if watch.should_stop():
        return PublishedOutcome(num_parameters=size, quality=None, progress=reached)
    quality = trainee.quality(measured)
    covered = torch.isin(measured.token_ids[measured.is_learnt].cpu(), ids).double().mean()
    figures = {
        "answers": len(pairs),
        "tokens": int(fitted.is_learnt.sum()),
        "draft_vocabulary_covers": round(float(covered), 4),
        **training_figures(reached),
        "held_out": asdict(quality),
    }
    tensors, config = published(trainee, sizes.vocab_size)
    save_file(tensors, folder / "model.safetensors")
    config = {**config, "about": figures | (about or {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return PublishedOutcome(num_parameters=size, quality=quality, progress=reached)


def faster_copy(network: PreTrainedModel) -> PreTrainedModel:
    """The network, or a bfloat16 copy on devices where that writes and reads text faster."""
    able = getattr(torch.cpu, "get_capabilities", dict)()
    has_bfloat16 = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if network.device.type == "cuda"
        else bool(able.get("amx_tile") or able.get("avx512_bf16"))
    )
    if not has_bfloat16 or network.dtype != torch.float32:
        return network
    copied: Any = deepcopy(network)
    return copied.to(torch.bfloat16)


def _ends(network: Any, ids: torch.Tensor) -> Target:  # noqa: ANN401 (the host's network)
    norm = getattr(network.model, "norm", None)
    if norm is None:
        raise UnsupportedModelError(f"{type(network).__name__} has no norm before its output layer")
    with torch.no_grad():
        return Target(
            embeddings=network.get_input_embeddings().weight.detach().float(),
            output=network.get_output_embeddings().weight.detach()[ids].float(),
            norm=norm.weight.detach().float(),
            draft_ids=ids.to(network.device),
        )
