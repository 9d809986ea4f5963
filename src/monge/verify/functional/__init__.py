"""Verification as tensor programs, for engines with logits of their own.

p = target law, q = draft law. Every function takes a whole batch, its randomness as uniforms, and
the shape of its trees as plain numbers. No function waits for the device, and no shape depends on
data. All can therefore be compiled, or captured in a CUDA graph after a first call that is not
captured.

The shape of a tree is `children`: the children of each node in drawing order. Node 0 is the last
committed token. `((1, 2), (), ())` is two candidates for a token, and a child named twice is a
token drawn twice; `children_of` computes it from parents. All trees of a batch have the same shape:
group requests by shape. For `block`, `exact_match`, `speculative_sampling` and `sample_and_match` a tree
may lack nodes of the shape, whose tokens are then negative.

Arguments are checked without a wait: wrong shapes and types, and wrong numbers on the host, raise
`OptionError`. A request with a wrong number on a device gets no token: `next_token` is -1.

Each function is the rule of the same name in `monge.verify`, whose page has its proof: for equal
uniforms it gives the verdict of the rule, except where a uniform lies within rounding of a
threshold. Uniforms are used in the order in which the rule draws them.
"""

from monge.verify.functional import on_host, optimum, rejection
from monge.verify.functional.arguments import checked, probs_from_logits, quantile
from monge.verify.functional.tensors import (
    Children,
    DraftLaws,
    Verified,
    children_of,
    num_uniforms,
)

exact_match = checked(rejection.exact_match, takes_padding=True)
sample_and_match = checked(rejection.sample_and_match, on_host.sample_and_match, takes_padding=True)
target_walk = sample_and_match  # its former name, for one release
block = checked(rejection.block, on_host.block, takes_padding=True)
speculative_sampling = checked(
    rejection.speculative_sampling, on_host.speculative_sampling, takes_padding=True
)
recursive_rejection = checked(rejection.recursive_rejection)
traversal = checked(rejection.traversal)
optimal = checked(optimum.optimal)
layer = checked(optimum.layer)

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
    "sample_and_match",
    "traversal",
]
