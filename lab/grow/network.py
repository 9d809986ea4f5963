"""`python -m lab.grow`: the default target with the cost of a large model, and the same law.

What a forward costs is decided by the shape of a network, what it says by its function. A
Llama-like network is widened and deepened so that the function stays: hidden units, heads and
neurons are repeated, and whatever reads them is divided by how often they are there; added layers
write nothing. The result says what the small network says, to rounding, so real text and a real
draft model's acceptance come at the price of a network of any size.

Reference:
    Chen, Goodfellow, Shlens, Net2Net: Accelerating Learning via Knowledge Transfer, arXiv
    1511.05641 (widening and deepening that preserve the function); here for root-mean-square norms,
    grouped queries and rotary positions.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from monge.core.errors import OptionError, UnsupportedModelError

_WIDTHS: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32)  # even ones keep whole groups of heads
_MIN_LAYERS: Final = 16  # the widest network that is at least so deep is taken
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMB]?)", re.IGNORECASE)
_UNITS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a grown network.

    Args:
        width: How often every hidden unit and query head is there.
        kv_width: How often every key-value head is there; divides `width`.
        intermediate: Neurons of every feed-forward layer.
        layers: Layers.
    """

    width: int
    kv_width: int
    intermediate: int
    layers: int

    def __post_init__(self) -> None:
        if (
            min(self.width, self.kv_width, self.intermediate, self.layers) < 1
            or self.width % self.kv_width
        ):
            raise OptionError(
                f"grow: sizes must be positive, and kv_width must divide width; got {self}"
            )

    def num_parameters(self, config: Any) -> int:  # noqa: ANN401 (the host's configurations share no type)
        """Parameters of the network of this shape grown from one with this configuration."""
        hidden = config.hidden_size * self.width
        heads = (
            config.num_attention_heads * self.width + config.num_key_value_heads * self.kv_width
        ) * config.head_dim
        layer = 2 * hidden * heads + 3 * hidden * self.intermediate + 2 * hidden
        tables = 1 if config.tie_word_embeddings else 2
        return self.layers * layer + tables * config.vocab_size * hidden + hidden


def num_parameters(text: str) -> float:
    """`0.5B`, `100M` or a plain number.

    Raises:
        OptionError: If it is none of these.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise OptionError(
            f"cannot read the size {text!r}; write a number of parameters such as 0.5B or 100M"
        )
    return float(found[1]) * _UNITS[found[2].upper()]


def shape_for(network: PreTrainedModel, params: float) -> Shape:
    """Return the shape closest to a number of parameters, with four neurons a hidden unit and 16 layers or more.

    Raises:
        OptionError: If the network has that many parameters already, or no shape comes near.
        UnsupportedModelError: If the network cannot be grown.
    """
    config = _checked(network)
    own = sum(weight.numel() for weight in network.parameters())
    for width in reversed(_WIDTHS):
        intermediate = max(4 * config.hidden_size * width, config.intermediate_size)
        one = Shape(width=width, kv_width=max(1, width // 2), intermediate=intermediate, layers=1)
        two = Shape(width=width, kv_width=max(1, width // 2), intermediate=intermediate, layers=2)
        layer = two.num_parameters(config) - one.num_parameters(config)
        layers = round((params - one.num_parameters(config)) / layer) + 1
        if layers >= max(_MIN_LAYERS, config.num_hidden_layers):
            return Shape(
                width=width, kv_width=one.kv_width, intermediate=intermediate, layers=layers
            )
    raise OptionError(
        f"grow: no shape of {params:.3g} parameters holds this network of {own:.3g}; ask for more"
    )


def grown(network: PreTrainedModel, shape: Shape) -> PreTrainedModel:
    """Return a network of another shape with the same law to rounding, of the same type and on the same device.

    It is filled tensor by tensor, so it takes no more memory than its own.

    Args:
        network: A Llama-like network; it is left as it is.
        shape: No smaller in any direction.

    Raises:
        UnsupportedModelError: If the network is of another kind.
        OptionError: If the shape is smaller somewhere.
    """
    config = _checked(network)
    if shape.layers < config.num_hidden_layers or shape.intermediate < config.intermediate_size:
        raise OptionError(
            f"grow: {shape} is smaller than the network, which has {config.num_hidden_layers} "
            "layers of "
            f"{config.intermediate_size} neurons"
        )
    settings = config.to_dict() | {
        "hidden_size": config.hidden_size * shape.width,
        "num_attention_heads": config.num_attention_heads * shape.width,
        "num_key_value_heads": config.num_key_value_heads * shape.kv_width,
        "head_dim": config.head_dim,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
    }
    large_config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        large: Any = AutoModelForCausalLM.from_config(
            large_config, dtype=network.dtype, attn_implementation=config._attn_implementation
        )
    with torch.no_grad():
        weights = _Weights(network, shape)
        for name, _ in list(large.named_parameters()):
            module, _, last = name.rpartition(".")
            value = weights.value(name).to(network.dtype).contiguous()
            setattr(
                large.get_submodule(module), last, torch.nn.Parameter(value, requires_grad=False)
            )
    large.tie_weights()
    # Its table of frequencies is no parameter: it is made anew where the weights are.
    large.model.rotary_emb = type(large.model.rotary_emb)(large_config).to(network.device)
    large.generation_config = network.generation_config
    return large.eval()


def write_grown(network: PreTrainedModel, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401 (the host's)
    """Write a network and a tokenizer to a new folder.

    Raises:
        OptionError: If the folder holds something, or there is no room.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{str(folder)!r} exists and is no empty folder; name another one")
    try:
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, RuntimeError) as error:
        raise OptionError(f"cannot write the grown network to {str(folder)!r}: {error}") from error


class _Weights:
    """Tensors of the large network from those of the small one."""

    def __init__(self, network: PreTrainedModel, shape: Shape) -> None:
        config = network.config
        self._small = network.state_dict()
        self._shape, self._device = shape, network.device
        heads, kv_heads, size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        # Every copy of a key-value head serves `width / kv_width` copies of the query heads of its
        # group.
        groups = (
            torch.arange(heads)
            .view(kv_heads, heads // kv_heads)
            .repeat(1, shape.width // shape.kv_width)
        )
        self._queries = self._channels(groups.repeat(shape.kv_width, 1).flatten(), size)
        self._keys = self._channels(torch.arange(kv_heads).repeat(shape.kv_width), size)
        self._neurons = (torch.arange(shape.intermediate) % config.intermediate_size).to(
            self._device
        )
        counts = torch.bincount(self._neurons, minlength=config.intermediate_size)
        self._neuron_share = 1.0 / counts[self._neurons].double()
        # Copies of a layer stand right behind it.
        self._layers = [
            index * config.num_hidden_layers // shape.layers for index in range(shape.layers)
        ]

    def value(self, name: str) -> Tensor:
        """The tensor of this name, in float64."""
        parts, is_added = name.split("."), False
        if parts[1] == "layers":
            index = int(parts[2])
            is_added = index > 0 and self._layers[index] == self._layers[index - 1]
            parts[2] = str(self._layers[index])
        kind = parts[-2]
        value = self._grown(kind, self._small[".".join(parts)].double())
        return torch.zeros_like(value) if is_added and kind in {"o_proj", "down_proj"} else value

    def _grown(self, kind: str, small: Tensor) -> Tensor:
        width = self._shape.width
        reads_hidden = {
            "q_proj": self._queries,
            "k_proj": self._keys,
            "v_proj": self._keys,
            "gate_proj": self._neurons,
            "up_proj": self._neurons,
        }
        if kind in reads_hidden:
            return small[reads_hidden[kind]].repeat(1, width) / width
        if kind == "o_proj":
            return small[:, self._queries].repeat(width, 1) / width
        if kind == "down_proj":
            return (small[:, self._neurons] * self._neuron_share).repeat(width, 1)
        if kind == "norm":
            return small.repeat(width) / width  # the output layer adds up `width` equal products
        return small.repeat(width) if small.dim() == 1 else small.repeat(1, width)

    def _channels(self, heads: Tensor, size: int) -> Tensor:
        return (heads[:, None] * size + torch.arange(size)).flatten().to(self._device)


def _checked(network: PreTrainedModel) -> Any:  # noqa: ANN401 (the host's configurations share no type)
    config: Any = network.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise UnsupportedModelError(
            f"{type(network).__name__} cannot be grown: only Llama networks without biases can, "
            "such as the built-in target"
        )
    if (
        math.gcd(config.num_attention_heads, config.num_key_value_heads)
        != config.num_key_value_heads
    ):
        raise UnsupportedModelError(
            "grow: query heads do not divide into groups of key-value heads"
        )
    return config
