"""`monge bench micro`: what a forward over tree nodes costs in every backend, by nodes and by requests; and reading prompts.

This is the question behind every window: a tree pays only while its further nodes cost little. All
backends are open at once and take turns at each cell, so that what slows the machine for a while
slows all of them; what is read is forgotten again, so that every measured forward reads behind the
same text.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from monge.bench.provenance import provenance
from monge.bench.statistics import Summary, paired_ratios
from monge.core.errors import BackendError, OptionError
from monge.core.model import NodeBlock, SequenceModel
from monge.core.words import counted
from monge.engine.backends.base import make_programs
from monge.engine.backends.registry import BACKENDS
from monge.engine.loading import as_sequence_model

_WARM_UPS: Final = 3
_STRIDE: Final = 7919  # a prime, so that texts differ and few tokens repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What is measured.

    Args:
        backends: Names of backends, with settings; the others are compared with the first.
        nodes: Nodes of a chain behind each text; 1 is a plain step.
        batch_sizes: Requests in one forward.
        context: Tokens of each text.
        repeats: Measured forwards of each backend in each cell.
        prompts: Tokens of prompts that are read whole, as requests begin.
    """

    backends: tuple[str, ...] = ("eager", "compiled")
    nodes: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32)
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    context: int = 128
    repeats: int = 30
    prompts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "batch_sizes"):
            if not getattr(self, name):
                raise OptionError(f"bench micro: {name} must be positive numbers; got none")
        for name in ("nodes", "batch_sizes", "prompts"):
            if min(getattr(self, name), default=1) < 1:
                raise OptionError(
                    f"bench micro: {name} must be positive numbers; got {getattr(self, name)}"
                )
        for name in ("context", "repeats"):
            if getattr(self, name) < 1:
                raise OptionError(
                    f"bench micro: {name} must be at least 1; got {getattr(self, name)}"
                )
        for name in self.backends:
            BACKENDS.parse(name)  # an unknown name or setting is an error that lists the known ones


def num_steps(settings: StepSettings) -> int:
    """How often `measure` says what it does."""
    cells = len(settings.nodes) + len(settings.prompts)
    return len(settings.backends) + len(settings.batch_sizes) * cells


def measure(
    settings: StepSettings, network: PreTrainedModel, notify: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Time every backend in every cell.

    Provenance, settings, one record a cell and backend, and who cannot run and why.

    Raises:
        BackendError: If none of the backends runs the network.
        OptionError: If text and nodes are longer than the network reads.
    """
    models, missing = _opened(settings, network, notify)
    records: list[dict[str, Any]] = []
    for batch, nodes in product(settings.batch_sizes, settings.nodes):
        notify(f"batch {batch}, {counted(nodes, 'node')}")
        records += _records(_cell(models, settings, batch, nodes), batch=batch, nodes=nodes)
    for batch, prompt in product(settings.batch_sizes, settings.prompts):
        notify(f"batch {batch}, prompts of {counted(prompt, 'token')}")
        records += _records(
            _prompt_cell(models, settings, batch, prompt), batch=batch, prompt=prompt
        )
    return {
        "provenance": provenance(network.device),
        "settings": asdict(settings),
        "network": repr(next(iter(models.values()))),
        "cells": records,
        "missing": missing,
    }


def _records(seconds: Mapping[str, list[float]], **cell: int) -> list[dict[str, Any]]:
    first = next(iter(seconds.values()))
    return [
        {
            "backend": name,
            **cell,
            "step_s": asdict(Summary.of(own)),
            "ratio": asdict(Summary.of(paired_ratios(own, first))),
        }
        for name, own in seconds.items()
    ]


def _opened(
    settings: StepSettings, network: PreTrainedModel, notify: Callable[[str], None]
) -> tuple[dict[str, SequenceModel], dict[str, str]]:
    models: dict[str, SequenceModel] = {}
    missing: dict[str, str] = {}
    for name in settings.backends:
        notify(f"starting {name}")
        try:
            with warnings.catch_warnings():
                # What runs eagerly after all would be measured under its name.
                warnings.simplefilter("error", UserWarning)
                model = as_sequence_model(network, backend=name)
                make_programs((model,))
            models[name] = model
        except (BackendError, UserWarning) as error:
            missing[name] = str(error)
    if not models:
        raise BackendError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    longest, needed = next(iter(models.values())).max_length, settings.context + max(settings.nodes)
    if longest is not None and needed > longest:
        raise OptionError(
            f"bench micro: a text of {settings.context} tokens and {max(settings.nodes)} nodes "
            f"are {needed}, and the network "
            f"reads {longest}; take a shorter --context"
        )
    if longest is not None and max(settings.prompts, default=0) > longest:
        raise OptionError(
            f"bench micro: a prompt of {max(settings.prompts)} tokens is longer "
            f"than the {longest} it can have"
        )
    return models, missing


def _cell(
    models: Mapping[str, SequenceModel], settings: StepSettings, batch: int, nodes: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in models}
    tokens = _texts(models, batch, settings.context + nodes)
    blocks = {
        row: NodeBlock.chain(tuple(own[settings.context :])) for row, own in enumerate(tokens)
    }
    for model in models.values():
        model.open({row: own[: settings.context] for row, own in enumerate(tokens)})
    try:
        for turn in range(_WARM_UPS + settings.repeats):
            for name, model in models.items():
                start = time.perf_counter()
                logits = model.extend(blocks)
                float(logits[0][-1, 0])  # waits for devices that work on their own
                if turn >= _WARM_UPS:
                    seconds[name].append(time.perf_counter() - start)
                model.commit(dict.fromkeys(blocks, ()))
    finally:
        for model in models.values():
            for row in range(batch):
                model.close(row)
    return seconds


def _prompt_cell(
    models: Mapping[str, SequenceModel], settings: StepSettings, batch: int, prompt: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in models}
    texts = dict(enumerate(_texts(models, batch, prompt)))
    for turn in range(_WARM_UPS + settings.repeats):
        for name, model in models.items():
            start = time.perf_counter()
            model.open(texts)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= _WARM_UPS:
                seconds[name].append(time.perf_counter() - start)
            for row in texts:
                model.close(row)
    return seconds


def _texts(models: Mapping[str, SequenceModel], batch: int, length: int) -> list[list[int]]:
    size = next(iter(models.values())).vocab_size
    return [
        [_STRIDE * (column + 1) * (row + 1) % size for column in range(length)]
        for row in range(batch)
    ]
