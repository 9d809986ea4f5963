"""`monge bench micro`: seconds of forwards over tree nodes, and of prompts, in every backend.

This is the question behind every window: a tree pays only while its further nodes cost little. All
backends are open at once and take turns at each cell, so that what slows the machine for a while
slows all of them; what is read is forgotten again, so that every measured forward reads behind the
same text.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from monge.backends.registry import BACKENDS
from monge.bench.provenance import provenance
from monge.bench.runner import OnCall, count_once, in_turns
from monge.bench.statistics import RepeatSummary, paired_ratios
from monge.core.errors import BackendError, OptionError
from monge.core.words import counted
from monge.loading.networks import as_sequence_model
from monge.networks.base import NodeBlock, SequenceModel
from monge.networks.hf_tree import make_models_ready
from monge.options import MEASURING, option

_STRIDE: Final = 7919  # a prime, so that texts differ and few tokens repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of the measurement, which are options of `monge bench micro`.

    Backends are compared with the first. Nodes are those of a chain behind each text, so 1 is a
    plain step. Prompts are read whole, as requests begin.
    """

    backends: tuple[str, ...] = option(
        ("eager", "compiled"), MEASURING, "May be repeated.", flags=("--backend",)
    )
    nodes: tuple[int, ...] = option(
        (1, 2, 4, 5, 8, 16, 32), MEASURING, "Nodes of a forward; may be repeated."
    )
    batch_sizes: tuple[int, ...] = option(
        (1, 4, 16), MEASURING, "Requests of a forward; may be repeated.", flags=("--batch",)
    )
    context: int = option(128, MEASURING, "Tokens of each text.")
    repeats: int = option(30, MEASURING, "Forwards of each cell.")
    prompts: tuple[int, ...] = option(
        (),
        MEASURING,
        "Also read prompts of so many tokens; may be repeated.",
        "none",
        kind=int,
        flags=("--prompt",),
    )

    def __post_init__(self) -> None:
        count_once(self, "backends", "nodes", "batch_sizes", "prompts")
        for name in ("nodes", "batch_sizes", "prompts"):
            sizes = getattr(self, name)
            if (not sizes and name != "prompts") or min(sizes, default=1) < 1:
                raise OptionError(f"bench micro: {name} must be positive numbers; got {sizes}")
        for name in ("context", "repeats"):
            if (size := getattr(self, name)) < 1:
                raise OptionError(f"bench micro: {name} must be at least 1; got {size}")
        for name in self.backends:
            BACKENDS.parse(name)  # an unknown name or setting is an error that lists the known ones


def measure(
    settings: StepSettings, network: PreTrainedModel, on_call: OnCall = lambda *_: None
) -> dict[str, Any]:
    """Time every backend in every cell; return records, provenance, settings, and why backends are missing.

    Raises:
        BackendError: If none of the backends runs the network.
        OptionError: If text and nodes are longer than the network reads.
    """
    num_cells = len(settings.batch_sizes) * len((*settings.nodes, *settings.prompts))
    on_call("starting", len(settings.backends) + num_cells)
    models, missing = _opened(settings, network, on_call)
    records: list[dict[str, Any]] = []
    for batch, nodes in product(settings.batch_sizes, settings.nodes):
        on_call(f"batch {batch}, {counted(nodes, 'node')}")
        records += _records(_cell(models, settings, batch, nodes), batch=batch, nodes=nodes)
    for batch, prompt in product(settings.batch_sizes, settings.prompts):
        on_call(f"batch {batch}, prompts of {counted(prompt, 'token')}")
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


def _records(seconds: Mapping[str, Sequence[float]], **cell: int) -> list[dict[str, Any]]:
    first = next(iter(seconds.values()))
    return [
        {
            "backend": name,
            **cell,
            "step_s": asdict(RepeatSummary.of(durations)),
            "ratio": asdict(RepeatSummary.of(paired_ratios(durations, first))),
        }
        for name, durations in seconds.items()
    ]


def _opened(
    settings: StepSettings, network: PreTrainedModel, on_call: OnCall
) -> tuple[dict[str, SequenceModel], dict[str, str]]:
    models: dict[str, SequenceModel] = {}
    missing: dict[str, str] = {}
    for name in settings.backends:
        on_call(f"starting {name}")
        try:
            with warnings.catch_warnings():
                # What runs eagerly after all would be measured under its name.
                warnings.simplefilter("error", UserWarning)
                model = as_sequence_model(network, backend=name)
                make_models_ready((model,))
            models[name] = model
        except (BackendError, UserWarning) as error:
            missing[name] = str(error)
    if not models:
        raise BackendError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    longest, needed = next(iter(models.values())).max_length, settings.context + max(settings.nodes)
    if longest is not None and needed > longest:
        raise OptionError(
            f"bench micro: a text of {settings.context} tokens and {max(settings.nodes)} nodes are "
            f"{needed}, and the network reads {longest}; take a shorter --context"
        )
    if longest is not None and (prompt := max(settings.prompts, default=0)) > longest:
        raise OptionError(
            f"bench micro: a prompt of {prompt} tokens is longer than the {longest} it can have"
        )
    return models, missing


def _cell(
    models: Mapping[str, SequenceModel], settings: StepSettings, batch: int, nodes: int
) -> dict[str, tuple[float, ...]]:
    tokens = _texts(models, batch, settings.context + nodes)
    ends = {row: tuple(token_ids[settings.context :]) for row, token_ids in enumerate(tokens)}
    blocks = {row: NodeBlock.chain(end) for row, end in ends.items()}

    def forward_s(model: SequenceModel) -> float:
        start = time.perf_counter()
        logits = model.extend(blocks)
        float(logits[0][-1, 0])  # waits for devices that work on their own
        seconds = time.perf_counter() - start
        model.commit(dict.fromkeys(blocks, ()))
        return seconds

    for model in models.values():
        model.open({row: token_ids[: settings.context] for row, token_ids in enumerate(tokens)})
    try:
        return _in_turns(models, settings.repeats, forward_s)
    finally:
        for model in models.values():
            for row in range(batch):
                model.close(row)


def _prompt_cell(
    models: Mapping[str, SequenceModel], settings: StepSettings, batch: int, prompt: int
) -> dict[str, tuple[float, ...]]:
    texts = dict(enumerate(_texts(models, batch, prompt)))

    def prefill_s(model: SequenceModel) -> float:
        start = time.perf_counter()
        model.open(texts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for row in texts:
            model.close(row)
        return seconds

    return _in_turns(models, settings.repeats, prefill_s)


def _in_turns(
    models: Mapping[str, SequenceModel], repeats: int, seconds_of: Callable[[SequenceModel], float]
) -> dict[str, tuple[float, ...]]:
    works = {name: partial(seconds_of, model) for name, model in models.items()}
    return in_turns(works, repeats)


def _texts(models: Mapping[str, SequenceModel], batch: int, length: int) -> list[list[int]]:
    size = next(iter(models.values())).vocab_size
    return [
        [_STRIDE * (column + 1) * (row + 1) % size for column in range(length)]
        for row in range(batch)
    ]
