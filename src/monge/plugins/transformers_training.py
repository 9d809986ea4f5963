"""Networks in training mode: what acts there alone, and decoding without it."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _NormBase

_RATE: Final = re.compile("drop|jitter", re.IGNORECASE)
"""Names of rates at which a network drops or shakes numbers, and of classes whose rate is `p`."""


def acting_modules(network: torch.nn.Module) -> list[str]:
    """Return the modules that compute another thing in training mode than in evaluation mode.

    These are dropout, also of attention weights and of whole layers, noise, and statistics of
    batches, in modules that are in training mode. A rate of 0 does nothing.

    Returns:
        For each module its name in the network, and the setting that acts: `model.layers.0.self_attn
        (attention_dropout=0.1)`.
    """
    return [
        f"{name or type(network).__name__} ({acts})"
        for name, module in network.named_modules()
        if module.training and (acts := _acting(module)) is not None
    ]


@contextmanager
def in_evaluation(network: torch.nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode inside this block, and each back into its own."""
    training = [module for module in network.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _acting(module: torch.nn.Module) -> str | None:
    """Return what a module does in training mode only, or `None`."""
    kind = type(module)
    if isinstance(module, torch.nn.RReLU) or (
        isinstance(module, _NormBase) and module.track_running_stats
    ):
        return kind.__name__
    values = {
        name: value
        for name, value in vars(module).items()
        if _RATE.search(name) or (name == "p" and _RATE.search(kind.__name__))
    }
    config = getattr(module, "config", None)
    if config is not None:
        values |= {name: getattr(config, name, None) for name in _read(kind) - vars(module).keys()}
    rates = [
        f"{name}={value}"
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]
    return ", ".join(rates) or None


@cache
def _read(kind: type[Any]) -> set[str]:
    """Return the names of rates that methods of a module read, some of them from its configuration."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    inner: list[Any] = [inspect.unwrap(method) for name, method in methods if name != "__init__"]
    codes = [function.__code__ for function in inner if inspect.isfunction(function)]
    return {name for code in codes for name in code.co_names if _RATE.search(name)}
