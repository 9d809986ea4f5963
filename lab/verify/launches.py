"""`python -m lab.verify --launches`: what a device launches for a verdict, as written and compiled.

It needs no device: the operations are counted on a CPU, views left out, and so are the kernels that
Inductor makes of the same trace for a CPU, with the operations that it leaves to torch. A device draws
from large vocabularies in blocks, so this does too. On a GPU, Inductor may make a few kernels more, where
it splits long sums.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor import metrics
from torch._ops import OpOverload
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lab.verify.measure import Trees, VerifySettings
from monge.backends.compiled_functions import compile_function
from monge.bench.provenance import provenance
from monge.core.draws import RequestDraws
from monge.core.errors import OptionError
from monge.core.law import Law
from monge.core.levels import in_blocks
from monge.core.sampling_rules import Recordable, Recorder, SamplingRules, launched
from monge.draft.tree.registry import TREES as TREES_BY_NAME
from monge.verify.base import Rule, as_verifier, unsupported_reason
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS

TREES: Final = ("chain(4)", "fixed_width((4, 1, 1, 1))", "fixed_width((4, 1, 1, 1), 'iid')")
RULES: Final = ("block", "target_walk", "rrs", "rrs_without_replacement", "traversal", "layer")
_VIEWS: Final = frozenset(
    {
        *("_unsafe_view", "alias", "as_strided", "detach", "empty_strided", "expand", "lift_fresh"),
        *("permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
        *("transpose", "unbind", "unflatten", "unsqueeze", "view"),
    }
)


class _Operations(TorchDispatchMode):
    """Counts operations that a device launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.count += func.overloadpacket.__name__ not in _VIEWS
        return func(*args, **(kwargs or {}))


@dataclass
class _Counter:
    """A `Recorder` that counts, one entry a call."""

    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __call__(self, function: Recordable, inputs: Sequence[Tensor]) -> Tensor:
        numbers = launched(function, inputs)  # what is made once is there now
        prepared = function.prepare(*inputs)
        with _Operations() as operations:
            function.decide(*prepared)
        metrics.reset()
        begun = time.perf_counter()
        form = compile_function(function.decide, prepared)
        seconds = time.perf_counter() - begun
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            form(*prepared)
        left = [event for event in profiled.events() or () if _is_launch(event)]
        self.records.append(
            {
                "operations": operations.count,
                "kernels": metrics.generated_kernel_count + len(left),
                "compile_s": seconds,
            }
        )
        return numbers


def _is_launch(event: FunctionEvent) -> bool:
    """Whether an event is an operation that no other one contains."""
    space, _, name = event.name.partition("::")
    parent = event.cpu_parent
    is_inner = parent is not None and parent.name.startswith("aten::")
    return space == "aten" and not is_inner and name not in _VIEWS


@dataclass
class _Stacked:
    """Laws that programs read, on whatever device they are; see `StackedLaws`."""

    scores: Tensor
    rules: SamplingRules
    record: Recorder
    is_stacked: bool = True

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, node: int) -> Law:
        raise NotImplementedError


def measure_launches(settings: VerifySettings) -> dict[str, Any]:
    """Count for every tree and every rule that has a program for it, one request.

    Raises:
        OptionError: If no rule has.
    """
    records: list[dict[str, Any]] = []
    vocab, (heat, truncation) = max(settings.vocab_sizes), settings.sampling[0]
    sampling = SamplingRules(temperature=heat, **truncation)
    for name in settings.trees or TREES:
        cell = {"vocab": vocab, "support": vocab}
        trees = Trees(TREES_BY_NAME.parse(name), cell, sampling, settings, torch.device("cpu"))
        for rule in settings.rules or RULES:
            facts = {"rule": rule, "tree": name, "nodes": trees.num_nodes, "vocab": vocab}
            records += [facts | counts for counts in _counted(VERIFIERS.parse(rule), trees)]
    if not records:
        raise OptionError("verify: none of these rules has a program for any of these trees")
    return {"provenance": provenance(torch.device("cpu")), "cells": records}


def _counted(rule: Rule, trees: Trees) -> list[dict[str, Any]]:
    limits = trees.limits
    if unsupported_reason(rule, limits.proposes, limits.max_width) is not None:
        return []
    counter = _Counter()
    laws = _Stacked(trees.logits, trees.sampling, counter)
    scored = ScoredTree(tree=trees.tree, target_laws=laws, draws=RequestDraws(0))
    room = "monge.verify.functional"
    with (
        patch(f"{room}.masked.independent", in_blocks),
        patch(f"{room}.tensors.independent", in_blocks),
    ):
        as_verifier(rule).by_programs([scored])
    return counter.records
