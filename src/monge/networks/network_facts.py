"""Facts about a `transformers` network that need no forward."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from monge.core.errors import UnsupportedModelError
from monge.networks.adapters import adapted_layers, can_merge

# Since transformers 5.24; before it, and in older code.
CACHE_KEYWORDS: Final = ("cache", "past_key_values", "cache_params")
WEIGHTS: Final = ("exact", "file", "bfloat16", "int8", "int4")
"""Forms in which a linear layer may store its weights, from the finest to the coarsest."""


def why_no_tree(model: PreTrainedModel) -> str | None:
    """Return why a network cannot read trees, or `None` if it can."""
    config = model.config.get_text_config()
    name = type(model).__name__
    reason = why_no_rollback(model)
    if reason is not None:
        return reason
    if "position_ids" not in forward_parameters(model) or getattr(config, "alibi", False):
        return f"{name} takes positions from the order of the tokens (ALiBi or similar), so siblings cannot share one"
    if str(config._attn_implementation) not in {"eager", "sdpa", "flex_attention"}:
        return f"{name} runs attention {config._attn_implementation!r}, which takes no 4-D mask; load it with eager or sdpa"
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    unknown = set(kinds or ()) - {"full_attention", "sliding_attention", "global"}
    if unknown:
        return f"{name} has layers of kind {', '.join(sorted(unknown))}, whose mask is not known"
    return None


def why_no_copy(network: PreTrainedModel, *, merges: bool = False) -> str | None:
    """Return why the weights of a network must not be copied, or `None` if they may.

    Args:
        network: The network.
        merges: Whether adapters that can be merged are merged in the copy.
    """
    for name, layer in adapted_layers(network):
        if not (merges and can_merge(layer)):
            return (
                f"{type(network).__name__} has adapters that can be switched or trained ({name}), "
                "and a copy of its weights would keep those of now; merge them first: "
                "model = model.merge_and_unload(), or use backend='eager'"
            )
    return None


def chooses_logits(network: PreTrainedModel) -> bool:
    """Return whether a network can compute the logits of some tokens only."""
    return "logits_to_keep" in forward_parameters(network)


def forward_parameters(network: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a network's forward by name.

    A forward that passes `**keywords` on also takes those of its base class.
    """
    merged: dict[str, inspect.Parameter] = {}
    for owner in type(network).__mro__:
        if "forward" in vars(owner):
            parameters = inspect.signature(vars(owner)["forward"]).parameters
            merged = {**parameters, **merged}
            if inspect.Parameter.VAR_KEYWORD not in {
                parameter.kind for parameter in parameters.values()
            }:
                break
    return merged


def cache_keyword(network: PreTrainedModel) -> str:
    """Return the keyword under which a network's forward takes its cache.

    It depends on the forward, not on the version of `transformers`: code that comes with a
    checkpoint keeps the older names.

    Raises:
        UnsupportedModelError: If it takes none.
    """
    parameters = forward_parameters(network)
    keyword = next((name for name in CACHE_KEYWORDS if name in parameters), None)
    if keyword is None:
        raise UnsupportedModelError(
            f"the forward of {type(network).__name__} takes no cache (none of "
            f"{', '.join(CACHE_KEYWORDS)}), so what it has read cannot be kept between tokens; use "
            "the network without monge"
        )
    return keyword


class OutputLayer(torch.nn.Module):
    """A network's output layer, with the scale and the cap of logits that some families add.

    Args:
        network: The network, whose layer is shared.

    Raises:
        UnsupportedModelError: If it has none.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        config, layer = network.config.get_text_config(), network.get_output_embeddings()
        if layer is None:
            raise UnsupportedModelError(
                f"{type(network).__name__} has no output layer, so its hidden states give no logits"
            )
        self.layer = layer
        self.factor = float(getattr(config, "logit_scale", None) or 1.0)
        self.divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self.cap = getattr(config, "final_logit_softcapping", None)

    def forward(self, states: Tensor) -> tuple[Tensor]:
        """Return the logits of last hidden states."""
        logits = self.layer(states)
        logits = logits if self.factor == 1.0 else logits * self.factor
        logits = logits if self.divisor == 1.0 else logits / self.divisor
        return (logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap,)


def why_no_rollback(network: PreTrainedModel) -> str | None:
    """Return why a network cannot take back tokens that it has read, or `None` if it can."""
    name, layers = type(network).__name__, own_cache(network).layers
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if network._is_stateful or recurrent:
        return f"{name} keeps recurrent state, through which a tree cannot be read in one pass"
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    kinds = {type(layer) for layer in layers if isinstance(layer, CacheLayerMixin)}
    if others := {kind.__name__ for kind in kinds if kind not in known}:
        return f"{name} keeps more than keys and values ({', '.join(sorted(others))}), which cannot be taken back here"
    return None


def own_cache(network: PreTrainedModel) -> DynamicCache:
    """Return an empty cache of the layers that a network needs.

    Raises:
        UnsupportedModelError: If `transformers` has none for it.
    """
    name = type(network).__name__
    # State inside the modules is shared by all sequences: two that are decoded together would mix.
    in_modules = any(hasattr(module, "_setup_cache") for module in network.modules())
    takes_usual: Any = network._supports_default_dynamic_cache
    if in_modules or not takes_usual():
        raise UnsupportedModelError(
            f"{name} keeps what it has read in a way of its own, not in the cache that "
            "transformers makes for other networks; use it without monge"
        )
    try:
        return DynamicCache(config=network.config)
    except KeyError as error:
        raise UnsupportedModelError(
            f"{name} has layers of kind {error}, for which transformers keeps no cache"
        ) from error


def check_causal(network: PreTrainedModel) -> None:
    """Refuse an encoder-decoder, and a network whose tokens see later tokens.

    Raises:
        UnsupportedModelError: If the network is of either kind.
    """
    if network.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(network).__name__} is an encoder-decoder; a decoder-only model is needed"
        )
    config = network.config.get_text_config()
    if (
        getattr(config, "use_bidirectional_attention", None) in {True, "all"}
        or getattr(config, "causal", True) is False
        or any(getattr(module, "is_decoder", None) is False for module in network.modules())
    ):
        raise UnsupportedModelError(
            f"{type(network).__name__}: tokens see those behind them, so the network gives no law "
            "of the next token; use it without monge, or, if it was trained so, load it "
            "with is_decoder=True, or what its settings call that"
        )


def context_length(config: Any) -> int | None:
    """Return the longest sequence that the network's positions allow, if bounded.

    Rotary embeddings of type `dynamic` stretch the positions by their factor.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope["factor"] if rope.get("rope_type") == "dynamic" else 1
    lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return next((int(factor * length) for length in lengths if length is not None), None)


def layer_windows(config: Any) -> dict[str, int | None]:
    """Return the sliding window, or `None`, of every kind of attention layer."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}


class PackedLayer(torch.nn.Module, ABC):
    """A linear layer that stores its matrix `[width, depth]` in another form than a parameter.

    A base class, since protocols do not see buffers: from Python 3.12 on, `isinstance` looks past
    `Module.__getattr__`.

    Attributes:
        width: Outputs.
        depth: Inputs.
        weights: How the matrix is stored, one of `WEIGHTS`.
        panels: The stored matrix.
    """

    width: int
    depth: int
    weights: str
    panels: Tensor

    @property
    @abstractmethod
    def rounds_inputs(self) -> bool:
        """True if inputs are rounded as well."""

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return a layer with the same numbers in a plain matrix."""


def packed_layers(module: torch.nn.Module) -> list[PackedLayer]:
    """Return the packed linear layers inside a module."""
    return [layer for layer in module.modules() if isinstance(layer, PackedLayer)]


def num_weights(model: PreTrainedModel) -> int:
    """Return the number of weights of a network; shared weights are counted once."""
    is_tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    # A packed output layer has a matrix of its own.
    shared = model.get_output_embeddings() if is_tied else None
    packed = [layer.width * layer.depth for layer in packed_layers(model) if layer is not shared]
    return sum(weight.numel() for weight in model.parameters()) + sum(packed)
