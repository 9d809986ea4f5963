"""Adapters inside a network, as PEFT adds them: what they change at present, and plain layers in their place."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

_SWITCHES: Final = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
_INNER: Final = ("base_layer", "original_module")
"""Names of the layer that an adapter changes, and of the layer that it replaces."""

Part = TypeVar("Part")


def adapted_layers(network: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with adapters inside a network, by name."""
    for name, module in network.named_modules():
        # Networks of transformers take adapters too, and have none for that.
        if hasattr(module, "set_adapter") and not isinstance(module, PreTrainedModel):
            yield name, module


def can_merge(layer: Any) -> bool:
    """Return whether a plain layer can take the place of a layer with adapters."""
    return hasattr(layer, "original_module") or (
        hasattr(layer, "merge") and hasattr(layer, "get_base_layer")
    )


def merged_layer(layer: Any) -> torch.nn.Module:
    """Return a plain layer that gives the numbers of a layer with its adapters, as they are switched now.

    Args:
        layer: The layer, which is left as it is. Where no adapter acts, its inner layer is returned.
    """
    active, is_off = layer.active_adapters, layer.disable_adapters
    if hasattr(layer, "original_module"):
        trained = layer.modules_to_save
        acts = not is_off and active and active[0] in trained
        return trained[active[0]] if acts else layer.original_module
    if bool(layer.merged) == is_off:
        with torch.inference_mode(mode=False), torch.no_grad():
            layer = copy.deepcopy(layer)
            (layer.unmerge if is_off else layer.merge)()
    return layer.get_base_layer()


def merge_adapters(network: torch.nn.Module) -> None:
    """Replace the layers with adapters by plain layers, in a copy of a network."""
    for name, layer in tuple(adapted_layers(network)):
        parent, _, child = name.rpartition(".")
        network.get_submodule(parent).add_module(child, merged_layer(layer))


def switches_of(module: Any) -> str:
    """Return how the adapters of a layer are switched and scaled; empty without adapters."""
    # Networks of transformers take adapters too, and have methods of these names. A class is asked
    # since a module takes a microsecond to miss a name.
    if not hasattr(type(module), "set_adapter") or isinstance(module, PreTrainedModel):
        return ""
    return repr([getattr(module, name, None) for name in _SWITCHES])


def plain_state(network: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a network by the names that they have without adapters.

    Those of adapters are left out.
    """
    return _without_adapters(network, network.state_dict())


def plain_modules(network: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of a network by the names that they have without adapters, which are left out.

    A module that is used in several places is named once.
    """
    return _without_adapters(network, dict(network.named_modules()))


def _without_adapters(
    network: torch.nn.Module, parts_by_name: Mapping[str, Part]
) -> dict[str, Part]:
    adapted = {name for name, _ in adapted_layers(network)}
    plain: dict[str, Part] = {}
    for name, part in parts_by_name.items():
        parts = name.split(".")
        owners = (end for end in range(1, len(parts)) if ".".join(parts[:end]) in adapted)
        if (end := next(owners, None)) is not None:
            if parts[end] not in _INNER:
                continue
            del parts[end]
        plain[".".join(parts)] = part  # an inner layer takes the place of the one around it
    return plain
