"""A network without some of its layers: the same weights, none of them copied."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from monge.core.errors import OptionError, UnsupportedModelError


def layer_subset(network: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return the network with these layers only; embeddings, final norm and output layer stay.

    Args:
        network: A causal language model.
        layers: Indices of layers to keep, increasing.

    Raises:
        OptionError: If they are not increasing indices of its layers.
        UnsupportedModelError: If its layers cannot be told apart, or some read what others keep.
    """
    config = network.config.get_text_config()
    total = int(config.num_hidden_layers)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= total:
        raise OptionError(
            f"a layer subset lists layers in increasing order, each between 0 and {total - 1}; "
            f"got {list(layers)}"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"{type(network).__name__} has layers that read other layers' keys, so none can be "
            "left out"
        )
    path = path_of_layers(network)
    settings = copy.deepcopy(network.config)
    text = settings.get_text_config()
    text.num_hidden_layers = len(layers)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [kinds[layer] for layer in layers]
    swap = {id(network.config): settings, id(config): settings.get_text_config()}
    top = module = _copied(network, swap)
    for name in path[:-1]:
        module._modules[name] = _copied(module._modules[name], swap)
        module = module._modules[name]
    kept = [
        _renumbered(module._modules[path[-1]][layer], place) for place, layer in enumerate(layers)
    ]
    module._modules[path[-1]] = torch.nn.ModuleList(kept)
    return top


def path_of_layers(network: PreTrainedModel) -> list[str]:
    """Return the names of modules that lead to the list of a network's layers.

    Raises:
        UnsupportedModelError: If there is no such list, or several.
    """
    total = int(network.config.get_text_config().num_hidden_layers)
    paths = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == total
        and all(map(_has_number, module))
    ]
    if len(paths) != 1:
        raise UnsupportedModelError(
            f"{type(network).__name__}: one list of {total} numbered layers was expected; found "
            f"{len(paths)}, so layers cannot be told apart"
        )
    return paths[0].split(".")


def _has_number(module: torch.nn.Module) -> bool:
    return any(isinstance(getattr(child, "layer_idx", None), int) for child in module.modules())


def _copied(module: Any, swap: dict[int, Any] | None = None) -> Any:
    """Return a copy of a module with replaceable children and the same weights."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    if swap and id(getattr(module, "config", None)) in swap:
        new.config = swap[id(module.config)]
    return new


def _renumbered(layer: torch.nn.Module, place: int) -> torch.nn.Module:
    """Return a copy of a layer that keeps its keys and values at another place of the cache."""
    new = _copied(layer)
    for name, child in layer.named_children():
        if _has_number(child):
            new._modules[name] = _renumbered(child, place)
    if isinstance(getattr(layer, "layer_idx", None), int):
        new.layer_idx = place
    return new
