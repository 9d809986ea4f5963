"""The parts and models that have names: text only, so that looking a name up imports none of them."""

import dataclasses
import warnings
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

_DEPTH_CONTROLLERS: Final = {
    "fixed": "monge.control.fixed:Fixed",
    "goodput": "monge.control.goodput:Goodput",
    "on_the_fly": "monge.control.on_the_fly:OnTheFly",
    "fsm": "monge.control.fsm:Fsm",
    "cached_fsm": "monge.control.fsm:CachedFsm",
    "q_learning": "monge.control.q_learning:QLearning",
}
PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "verifier": {
        "sample_and_match": "monge.verify.sample_and_match:SampleAndMatch",
        "speculative_sampling": "monge.verify.speculative_sampling:SpeculativeSampling",
        "recursive_rejection": "monge.verify.recursive_rejection:RecursiveRejection",
        "recursive_rejection_without_replacement": (
            "monge.verify.recursive_rejection_without_replacement:RecursiveRejectionWithoutReplacement"
        ),
        "naive_tree": "monge.verify.naive_tree:NaiveTree",
        "k_seq": "monge.verify.k_seq:KSeq",
        "greedy": "monge.verify.greedy:Greedy",
        "canonical": "monge.verify.canonical:Canonical",
        "gumbel": "monge.verify.gumbel:Gumbel",
        "block": "monge.verify.block:Block",
        "multipath_block": "monge.verify.multipath_block:MultipathBlock",
        "traversal": "monge.verify.traversal:Traversal",
        "layer": "monge.verify.layer:Layer",
        "optimal": "monge.verify.optimal:Optimal",
    },
    "drafter": {
        "model": "monge.draft.model:Model",
        "ensemble": "monge.draft.ensemble:Ensemble",
        "shape": "monge.draft.shape:Shape",
        "retokenize": "monge.draft.retokenize:Retokenize",
        "head": "monge.draft.published_heads:Head",
        "ngram": "monge.draft.ngram:Ngram",
        "suffix": "monge.draft.suffix:Suffix",
        "pool": "monge.draft.pool:Pool",
        "none": "monge.draft.base:NoDrafter",
    },
    "tree": {
        "chain": "monge.draft.tree.fixed_width:Chain",
        "fixed_width": "monge.draft.tree.fixed_width:FixedWidth",
        "paths": "monge.draft.tree.paths:Paths",
        "best_first": "monge.draft.tree.best_first:BestFirst",
        "eagle2": "monge.draft.tree.best_first:Eagle2",
    },
    "depth controller": _DEPTH_CONTROLLERS,
    "controller": {
        **_DEPTH_CONTROLLERS,
        "hedge": "monge.control.hedge:Hedge",
        "linear_selection": "monge.control.linear_selection:LinearSelection",
    },
    "backend": {
        "eager": "monge.backends.registry:Eager",
        "compiled": "monge.backends.registry:Compiled",
    },
}
"""Classes by kind and name, in the form of entry points."""

FORMER_NAMES: Final = {
    "target_walk": "sample_and_match",
    "single_draft": "speculative_sampling",
    "rrs": "recursive_rejection",
    "rrs_without_replacement": "recursive_rejection_without_replacement",
}
"""Names of parts that this release takes beside the present names."""

_NAMES: Final = {place: name for table in PARTS.values() for name, place in table.items()}


def present_name(name: str) -> str:
    """Return the present name of a part; a former name is taken with a warning."""
    if name not in FORMER_NAMES:
        return name
    present = FORMER_NAMES[name]
    text = f"{name!r} is {present!r} now; the next release takes no other name"
    warnings.warn(text, FutureWarning, stacklevel=3)
    return present


class Part:
    """A part of a decoder: its representation is the text that a registry reads.

    Settings that are their defaults, and what the engine provides, are left out.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Part.__repr__  # or `dataclass` would add another

    def __repr__(self) -> str:
        kind: Any = type(self)
        name = _NAMES.get(f"{kind.__module__}:{kind.__qualname__}") or kind.__name__
        shown = [
            f"{field.name}={value!r}"
            for field in (dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ())
            if field.init and field.repr
            if (value := getattr(self, field.name)) is not field.default and value != field.default
        ]
        return f"{name}({', '.join(shown)})" if shown else name


HEADS: Final = {"smollm2-head": "smollm2_head"}
"""Heads that ship with this package, by name, with their folders. `smollm2-head` is an EAGLE-3 head."""


def built_in(name: str) -> Path:
    """Return the folder of a model that ships with this package: `target`, `draft`, `shape`, or one of `HEADS`."""
    return Path(str(files("monge"))) / "models" / name
