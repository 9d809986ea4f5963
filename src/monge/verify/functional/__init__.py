"""Verification as tensor programs, for engines with logits of their own.

p = target law, q = draft law. Every function takes a whole batch, its randomness as uniforms, and
the shape of its trees as plain numbers. None waits for the device, and no shape depends on data, so
that all can be compiled, or captured in a CUDA graph after one call that is not captured.

The shape of a tree is `children`: the children of each node in drawing order. Node 0 is the last
committed token. `((1, 2), (), ())` is two candidates for one token, and a child named twice is a
token drawn twice; `children_of` makes it of parents. All trees of a batch have one shape: group
requests by shape. For `block`, `exact_match` and `target_walk` some may lack nodes of it, whose
tokens are negative then.

Each function is the rule of the same name in `monge.verify`, whose page has its proof: for equal
uniforms it gives the verdict of the rule, except where a uniform lies within rounding of a
threshold. Uniforms are used in the order in which the rule draws them.
"""

from monge.core.sampling_rules import probs_from_logits
from monge.verify.functional.optimum import layer, optimal
from monge.verify.functional.rejection import (
    block,
    exact_match,
    recursive_rejection,
    speculative_sampling,
    target_walk,
    traversal,
)
from monge.verify.functional.tensors import (
    Children,
    DraftLaws,
    Verified,
    children_of,
    num_uniforms,
    quantile,
)

__all__ = [
    "Children",
    "DraftLaws",
    "Verified",
    "block",
    "children_of",
    "exact_match",
    "layer",
    "num_uniforms",
    "optimal",
    "probs_from_logits",
    "quantile",
    "recursive_rejection",
    "speculative_sampling",
    "target_walk",
    "traversal",
]
