"""Medusa and EAGLE heads, trained on texts like SHAPE heads and saved in their published formats."""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Int64
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import unknown_name
from monge.heads.readers.eagle import EagleHead
from monge.heads.readers.medusa import MedusaHead
from monge.heads.readers.reading import Reading
from monge.heads.readers.tensors import Settings, Tensors
from monge.heads.target import TargetSizes
from monge.training.chain import ChainQuality, Step, Weights, chain_loss, chain_quality
from monge.training.loop import NOBODY, Outcome, Recipe, Trainee, Watch, fit
from monge.training.texts import (
    HELD_OUT_ROWS,
    Ends,
    Texts,
    Windows,
    all_windows,
    feature_model,
    gradient_ends,
    num_windows,
    random_windows,
    read_texts,
    thirds,
    wide,
)

_ROWS: Final = 8  # rows of one measurement's forward


@dataclass(kw_only=True, eq=False)
class PublishedTrainee(Trainee):
    """A head of a published kind.

    Args:
        fitted: Training text and states.
        held_out: Held-out text and states, for early stopping.
        ends: The target's embedding and output layer.
        parts: Weights of the loss terms.
        num_steps: Length of a chain.
        layer: Llama-like configuration of a layer of the target's size, see `layer_config`.
        seed: Seed of the initial weights.
    """

    file: ClassVar[str]

    fitted: Texts
    held_out: Texts
    ends: Ends
    parts: Weights
    num_steps: int
    layer: Mapping[str, Any]
    seed: int = 0
    tensors: dict[str, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_windows(self.fitted, self.num_steps)  # refuses rows that are too short
        device = self.fitted.states.device
        fresh = self.initial()
        self.tensors = {name: part.to(device).requires_grad_() for name, part in fresh.items()}

    @abstractmethod
    def initial(self) -> dict[str, Tensor]:
        """Initial weights under the names of the published format."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """Configuration of the published format."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors


class MedusaTrainee(PublishedTrainee):
    """Medusa heads of one residual block each, initialised as the target's output layer on the unchanged state.

    Loss terms on states do not apply.

    Reference:
        Cai et al., arXiv 2401.10774; losses as for SHAPE heads.
    """

    file = "medusa_lm_head.safetensors"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head = MedusaHead(Tensors.in_memory(self.tensors), [1] * self.num_steps)

    def initial(self) -> dict[str, Tensor]:
        hidden, device = self.fitted.states.shape[-1], self.fitted.states.device
        zero, eye = torch.zeros(1, hidden, device=device), torch.eye(hidden, device=device)
        with torch.no_grad():
            # The output layer as a matrix, read off unit states, without a bias or a cap.
            output = (self.ends.unembed(eye) - self.ends.unembed(zero)).float().T
        tensors: dict[str, Tensor] = {}
        for step in range(self.num_steps):
            tensors[f"{step}.0.linear.weight"] = torch.zeros(hidden, hidden)
            tensors[f"{step}.0.linear.bias"] = torch.zeros(hidden)
            tensors[f"{step}.1.weight"] = output.clone().contiguous()
        return tensors

    @property
    def config(self) -> Mapping[str, Any]:
        sizes = {"medusa_num_heads": self.num_steps, "medusa_num_layers": 1}
        return {"architectures": ["MedusaModel"], **sizes}

    def loss(self, batch_size: int, generator: torch.Generator, share: float = 1.0) -> Tensor:
        del share
        windows = random_windows(self.fitted, batch_size, self.num_steps, self.ends, generator)
        return chain_loss(self._steps(windows), self.parts)

    @torch.no_grad()
    def quality(self, texts: Texts) -> ChainQuality:
        return chain_quality(map(self._steps, all_windows(texts, self.num_steps, self.ends)))

    def _steps(self, windows: Windows) -> Iterator[Step]:
        for number in range(self.num_steps):
            with torch.no_grad():
                true = self.ends.unembed(windows.true[:, number]).float()
            drafted = self.head.step(number, windows.states)
            yield Step(drafted, true, windows.token_ids[:, number])


class EagleTrainee(PublishedTrainee):
    """An EAGLE head of one layer, initialised as the identity on the state.

    All steps of a chain are trained. From the second step on, the head reads its own predictions of
    the previous step, as in HASS and EAGLE-3. Attention then reads predictions at earlier positions
    too, where decoding reads the target's states, so figures of deeper steps are slightly
    pessimistic. The distance of predicted and true states is added to the loss with weight 1.

    Reference:
        Li et al., EAGLE, arXiv 2401.15077; training on own predictions: HASS, arXiv 2408.15766.
    """

    file = "model.safetensors"

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = Settings(self.layer, "eagle training")
        self.head = EagleHead(Tensors.in_memory(self.tensors), settings)

    def initial(self) -> dict[str, Tensor]:
        hidden, generator = self.layer["hidden_size"], torch.Generator().manual_seed(self.seed)
        return {
            "fc.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1),
            **initial_layer("layers.0", self.layer, hidden, generator),
        }

    @property
    def config(self) -> Mapping[str, Any]:
        return self.layer

    def loss(self, batch_size: int, generator: torch.Generator, share: float = 1.0) -> Tensor:
        del share
        rows, length = self.fitted.token_ids.shape
        which = torch.randint(rows, (max(1, batch_size // length),), generator=generator)
        which = which.to(self.fitted.states.device)
        texts = Texts(token_ids=self.fitted.token_ids[which], states=self.fitted.states[which])
        return chain_loss(self._steps(texts), self.parts, distance=1.0)

    @torch.no_grad()
    def quality(self, texts: Texts) -> ChainQuality:
        starts = range(0, len(texts.token_ids), _ROWS)
        return chain_quality(
            self._steps(texts.rows(slice(start, start + _ROWS))) for start in starts
        )

    def _steps(self, texts: Texts) -> Iterator[Step]:
        """The steps of chains that start at every position.

        Step n of the chain that starts with the pair at place t is the prediction at place t + n -
        1, about the token after.
        """
        rows, length = texts.token_ids.shape
        states, chains = wide(texts.states), length - 1 - self.num_steps
        embeddings = self.ends.embed(texts.token_ids[:, 1:]).to(states.dtype).flatten(0, 1)
        read = states[:, :-1]
        for number in range(self.num_steps):
            segments = [Reading(self.head.num_kept).read(range(length - 1)) for _ in range(rows)]
            found = self.head.advance(embeddings, read.flatten(0, 1), segments)
            found = found.unflatten(0, (rows, -1))
            here, true = found[:, number:][:, :chains], states[:, number + 1 :][:, :chains]
            with torch.no_grad():
                logits = self.ends.unembed(true).float().flatten(0, 1)
            drafted = self.head.logits(here.flatten(0, 1), self.ends.unembed)
            tokens = texts.token_ids[:, number + 2 :][:, :chains].flatten()
            yield Step(drafted, logits, tokens, states=(here, true))
            read = torch.cat([states[:, :1], found[:, :-1]], dim=1)


KINDS: Final[Mapping[str, type[PublishedTrainee]]] = {
    "medusa": MedusaTrainee,
    "eagle": EagleTrainee,
}


def train_published(
    kind: str,
    network: PreTrainedModel,
    rows: Int64[Tensor, "rows seq"],
    folder: Path,
    *,
    recipe: Recipe,
    num_steps: int = 3,
    watch: Watch = NOBODY,
    about: Mapping[str, Any] | None = None,
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
    target = feature_model(network)
    fitted, chosen, held_out = thirds(read_texts(target, rows, on_rows=watch.on_read))
    trainee = KINDS[kind](
        fitted=fitted,
        held_out=chosen.rows(slice(0, HELD_OUT_ROWS)),
        ends=gradient_ends(network),
        parts=recipe.weights,
        num_steps=num_steps,
        layer=layer_config(network, TargetSizes.of(target)),
        seed=recipe.seed,
    )
    outcome = fit(trainee, recipe, folder, watch, measured=held_out)
    if outcome.quality is not None:
        figures = {"tokens": rows.numel(), **outcome.figures, **(about or {})}
        config = {**trainee.config, "about": figures}
        save_published(folder / trainee.file, rounded(trainee.weights), config)
    return outcome


def save_published(file: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Save a head in a published format."""
    save_file(dict(tensors), file)
    text = json.dumps(config, indent=2) + "\n"
    (file.parent / "config.json").write_text(text, encoding="utf-8")


def rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round weights to bfloat16, which changes a draft law slightly and the output law not at all."""
    return {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in weights.items()
    }


def initial_layer(
    name: str, config: Mapping[str, Any], width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Weights of a Llama layer, by name, whose output projections are zero: states pass unchanged.

    Args:
        name: Prefix of the names.
        config: Configuration of the layer, see `layer_config`.
        width: Width of what its attention reads.
        generator: Source of the weights.
    """
    hidden, inner, dim = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    return {
        f"{name}.self_attn.q_proj.weight": drawn(heads * dim, width),
        f"{name}.self_attn.k_proj.weight": drawn(kv_heads * dim, width),
        f"{name}.self_attn.v_proj.weight": drawn(kv_heads * dim, width),
        f"{name}.self_attn.o_proj.weight": torch.zeros(hidden, heads * dim),
        f"{name}.mlp.gate_proj.weight": drawn(inner, hidden),
        f"{name}.mlp.up_proj.weight": drawn(inner, hidden),
        f"{name}.mlp.down_proj.weight": torch.zeros(hidden, inner),
        f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
    }


def layer_config(network: PreTrainedModel, sizes: TargetSizes) -> dict[str, Any]:
    """Configuration of a Llama layer of the target's size."""
    config = network.config.get_text_config()

    def given(name: str, default: Any) -> Any:
        return getattr(config, name, None) or default

    heads = int(given("num_attention_heads", max(1, sizes.hidden_size // 64)))
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(given("num_key_value_heads", heads)),
        "head_dim": int(given("head_dim", sizes.hidden_size // heads)),
        "intermediate_size": int(given("intermediate_size", 4 * sizes.hidden_size)),
        "hidden_act": "silu",
        "rms_norm_eps": float(given("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "bias": False,
    }
