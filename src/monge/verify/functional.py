"""Verification as tensor programs, for engines with logits of their own.

p = target law, q = draft law. Every function takes a whole batch, its randomness as uniforms, and
the shape of its trees as plain numbers. None waits for the device, and no shape depends on data, so
that all can be compiled, or captured in a CUDA graph after one call that is not captured.

The shape of a tree is `children`: the children of each node in drawing order. Node 0 is the last
committed token. `((1, 2), (), ())` is two candidates for one token, and a child named twice is a
token drawn twice; `children_of` makes it of parents. All trees of a batch have one shape: group
requests by shape.

Each function is the rule of the same name in `monge.verify`, whose page has its proof: for equal
uniforms it gives the verdict of the rule, except where a uniform lies within rounding of a
threshold. Uniforms are used in the order in which the rule draws them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from monge.core.errors import OptionError, ProposalMismatchError
from monge.core.sampling_rules import probs_from_logits
from monge.core.tree import depths_of, path_to

__all__ = [
    "Children",
    "DraftLaws",
    "Verified",
    "block",
    "children_of",
    "exact_match",
    "num_uniforms",
    "probs_from_logits",
    "quantile",
    "recursive_rejection",
    "speculative_sampling",
    "target_walk",
    "traversal",
]

Children = Sequence[Sequence[int]]


class Verified(NamedTuple):
    """The verdicts of a batch.

    Attributes:
        path: Accepted nodes from the root's child down, -1 where no more are accepted, `[batch,
            depth]`.
        num_accepted: Their number, `[batch]`.
        next_token: The token after them, by correction or bonus; -1 where the target's logits at
            a node that decides are not finite, `[batch]`.
        num_uniforms: Uniforms used; those after them may be given to the next round, `[batch]`.
    """

    path: Int64[Tensor, "batch depth"]
    num_accepted: Int64[Tensor, " batch"]
    next_token: Int64[Tensor, " batch"]
    num_uniforms: Int64[Tensor, " batch"]


class DraftLaws(NamedTuple):
    """The laws from which the children of each node were drawn.

    Attributes:
        probs: Masses, float64, rows of nodes with children summing to one, `[batch, nodes,
            support]`. Rows of leaves are not read.
        token_ids: Tokens of the masses, each once, with mass zero where padded, `[batch, nodes,
            support]`; `None` if the support is the vocabulary.
    """

    probs: Float64[Tensor, "batch nodes support"]
    token_ids: Int64[Tensor, "batch nodes support"] | None = None


def quantile(
    probs: Float64[Tensor, "*rows vocab"], positions: Float64[Tensor, " *rows"]
) -> Int64[Tensor, " *rows"]:
    """Return the tokens whose cumulative intervals cover positions in [0, 1): draws from the laws.

    Args:
        probs: Laws.
        positions: One uniform a law.

    Returns:
        Tokens, never one of mass zero; -1 where the law is NaN.
    """
    sums = probs.cumsum(-1)
    total = sums[..., -1:]
    found = torch.searchsorted(sums, positions[..., None] * total, right=True)
    return torch.where(total.isnan(), -1, found).squeeze(-1)


def exact_match(
    logits: Float[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
) -> Verified:
    """Verify drafts of greedy decoding, of any origin: follow the target's most probable tokens.

    Args:
        logits: The target's logits after every node.
        token_ids: Tokens of the nodes.
        children: Children of each node.
    """
    largest, best = logits.max(-1)
    best = torch.where(largest.isfinite(), best, -1)
    walk = _Walk(children, token_ids)
    for _ in range(walk.depth):
        walk.follow(best.gather(1, walk.node[:, None]).squeeze(1))
    return walk.verified(best.gather(1, walk.node[:, None]).squeeze(1), 0 * walk.node)


def target_walk(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
    uniforms: Float64[Tensor, "batch uniforms"],
) -> Verified:
    """Verify candidates of any origin: draw from p, and go on from the candidate that was drawn.

    The optimum for deterministic candidates, such as looked-up text or most probable tokens; see
    `monge.verify.target_walk`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes.
        children: Children of each node.
        uniforms: At least the depth of the tree and one more for each request.
    """
    _check_uniforms(uniforms, num_uniforms(children))
    walk = _Walk(children, token_ids)
    token = next_token = quantile(_at_node(probs, walk.node), uniforms[:, 0])
    used = torch.ones_like(walk.node)
    for level in range(walk.depth):
        walk.follow(token)
        token = quantile(_at_node(probs, walk.node), uniforms[:, level + 1])
        next_token = torch.where(walk.is_open, token, next_token)
        used = used + walk.is_open
    return walk.verified(next_token, used)


def speculative_sampling(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    draft: DraftLaws,
    uniforms: Float64[Tensor, "batch uniforms"],
) -> Verified:
    """Verify chains whose tokens were each drawn from q: accept x with probability min(1, p_x / q_x).

    Reference:
        Leviathan et al., arXiv 2211.17192, Algorithm 1; see `monge.verify.single_draft`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes.
        draft: q of every node.
        uniforms: At least as many as nodes for each request.
    """
    chain = children_of(range(-1, probs.shape[1] - 1))
    return recursive_rejection(probs, token_ids, chain, draft, uniforms)


def recursive_rejection(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
    draft: DraftLaws,
    uniforms: Float64[Tensor, "batch uniforms"],
    *,
    replacement: bool = True,
) -> Verified:
    """Verify trees level by level: try siblings in drawing order against what is left of p.

    Reference:
        SpecInfer (Miao et al., arXiv 2305.09781, Algorithm 2), and without replacement RSD (Jeon et
        al., arXiv 2402.14160); see `monge.verify.rrs` and `rrs_without_replacement`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes, siblings in drawing order.
        children: Children of each node.
        draft: q of every node.
        uniforms: At least `num_uniforms(children)` for each request.
        replacement: Whether siblings are independent draws. Otherwise each was drawn from q without
            the tokens of its elder siblings.
    """
    _check_uniforms(uniforms, num_uniforms(children))
    walk = _Walk(children, token_ids)
    tensors = _TreeTensors.of(_frozen(children), token_ids.device)
    used = torch.zeros_like(walk.node)
    law = _at_node(probs, walk.node)
    for _ in range(walk.depth):
        p, (q, ids) = law, _draft_at(draft, walk.node)
        siblings = tensors.children[walk.node]
        token = torch.full_like(walk.node, -1)
        for place in range(siblings.shape[1]):
            child = siblings[:, place]
            x = token_ids.gather(1, child.clamp_min(0)[:, None])
            is_tried = walk.is_open & (child >= 0) & (token < 0)
            ratio = p.gather(1, x).squeeze(1) / _mass(q, ids, x)
            is_hit = is_tried & (_next(uniforms, used) < ratio)
            used = used + is_tried
            token = torch.where(is_hit, x.squeeze(1), token)
            rest, total = _excess(torch.ones_like(ratio), p, q, ids)
            # Nothing is left only where x was certain to be accepted.
            is_left = is_tried & ~is_hit & ~(total == 0.0)
            p = torch.where(is_left[:, None], rest / total[:, None], p)
            if not replacement:
                q = torch.where((is_tried & ~is_hit)[:, None], _without(q, ids, x), q)
        law = torch.where(walk.is_open[:, None], p, law)
        walk.follow(token)
        law = torch.where(walk.is_open[:, None], _at_node(probs, walk.node), law)
    return walk.verified(quantile(law, _next(uniforms, used)), used + 1)


def block(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    draft: DraftLaws,
    uniforms: Float64[Tensor, "batch uniforms"],
) -> Verified:
    """Verify chains whose tokens were each drawn from q, the whole block at once.

    Reference:
        Block Verification (Sun et al., arXiv 2403.10444, Algorithm 2), optimal for one path; see
        `monge.verify.block`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes.
        draft: q of every node.
        uniforms: At least as many as nodes for each request.
    """
    _check_uniforms(uniforms, probs.shape[1])
    depth = probs.shape[1] - 1
    scales, masses = [torch.ones_like(probs[:, 0, 0])], list[Float64[Tensor, " batch"]]()
    for node in range(depth):
        p, (q, ids) = probs[:, node], _draft_of(draft, node)
        x = token_ids[:, node + 1, None]
        masses.append(_excess(scales[-1], p, q, ids)[1])
        ratio = scales[-1] * p.gather(1, x).squeeze(1) / _mass(q, ids, x)
        # A token with a = 0 is not accepted, nor is any after it.
        scales.append(torch.where(scales[-1] > 0.0, ratio.clamp_max(1.0), scales[-1]))
    accepted, used = torch.zeros_like(token_ids[:, 0]), torch.zeros_like(token_ids[:, 0])
    is_decided = torch.zeros_like(accepted, dtype=torch.bool)
    for end in range(depth, 0, -1):
        prob = scales[end] if end == depth else _share(masses[end], scales[end])
        is_asked = ~is_decided & ~(scales[end] == 0.0)
        # A scale is NaN below a node whose logits are not finite: the request ends there.
        is_hit = is_asked & ~(_next(uniforms, used) >= prob)
        used = used + is_asked
        accepted = torch.where(is_hit, end, accepted)
        is_decided = is_decided | is_hit
    at = accepted.clamp_max(max(depth - 1, 0))
    p = _at_node(probs, accepted)
    scale = torch.stack(scales, 1).gather(1, accepted[:, None]).squeeze(1)
    rest, total = _excess(scale, p, *_draft_at(draft, at))
    is_rest = (accepted < depth) & ~(total == 0.0)
    law = torch.where(is_rest[:, None], rest / total[:, None], p) + 0.0 * scale[:, None]
    next_token = quantile(law, _next(uniforms, used))
    levels = torch.arange(1, depth + 1, device=accepted.device)
    return Verified(
        path=torch.where(levels <= accepted[:, None], levels, -1),
        num_accepted=accepted,
        next_token=next_token,
        num_uniforms=used + 1,
    )


def traversal(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
    draft: DraftLaws,
    uniforms: Float64[Tensor, "batch uniforms"],
) -> Verified:
    """Verify trees drawn without replacement, from their leaves to their root.

    Reference:
        Traversal Verification (arXiv 2505.12398); see `monge.verify.traversal`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes, siblings in drawing order.
        children: Children of each node.
        draft: q of every node; siblings were drawn from it without replacement.
        uniforms: At least as many as nodes for each request.
    """
    _check_uniforms(uniforms, num_uniforms(children))
    tensors = _TreeTensors.of(_frozen(children), token_ids.device)
    used = torch.zeros_like(token_ids[:, 0])
    accepted = torch.full_like(used, -1)
    law = probs[:, 0]

    def visit(
        node: int, weight: Float64[Tensor, " batch"], is_here: Bool[Tensor, " batch"]
    ) -> None:
        nonlocal used, accepted, law
        p, (q, ids) = probs[:, node], _draft_of(draft, node)
        own = tuple(dict.fromkeys(children[node]))
        for child in own:
            x = token_ids[:, child, None]
            below = (weight * p.gather(1, x).squeeze(1) / _mass(q, ids, x)).clamp_max(1.0)
            visit(child, below, is_here & (accepted < 0) & ~(below == 0.0))
            is_going = is_here & (accepted < 0)
            rest, total = _excess(weight, p, q, ids)
            is_left = is_going & ~(total == 0.0)
            p = torch.where(is_left[:, None], rest / total[:, None], p)
            weight = torch.where(is_going, _share(total, weight), weight)
            if child != own[-1]:
                q = _without(q, ids, x)
        is_asked = is_here & (accepted < 0)
        is_hit = is_asked if node == 0 else is_asked & ~(_next(uniforms, used) >= weight)
        if node:
            used = used + is_asked
        accepted = torch.where(is_hit, node, accepted)
        # A weight is NaN below a node whose logits are not finite.
        law = torch.where(is_hit[:, None], p + 0.0 * weight[:, None], law)

    visit(0, torch.ones_like(law[:, 0]), accepted < 0)
    return Verified(
        path=tensors.paths[accepted],
        num_accepted=tensors.depths[accepted],
        next_token=quantile(law, _next(uniforms, used)),
        num_uniforms=used + 1,
    )


def num_uniforms(children: Children) -> int:
    """Return the most uniforms that any of the functions uses for a tree of this shape.

    That is one a candidate, and one for the token after them.
    """
    return 1 + sum(map(len, children))


def children_of(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the children of each node.

    Args:
        parents: Parent of each node: -1 for node 0, and a smaller number than its own for every
            other; `(-1, 0, 1, 2)` is a chain of three.
    """
    nodes = range(len(parents))
    if not nodes or parents[0] != -1 or any(not 0 <= parents[node] < node for node in nodes[1:]):
        raise ProposalMismatchError(
            f"parents: got {tuple(parents)}; expected -1 for node 0, and for every other node a "
            "smaller one"
        )
    return tuple(tuple(child for child in nodes if parents[child] == node) for node in nodes)


class _TreeTensors(NamedTuple):
    """Shape of a tree, on a device.

    Attributes:
        children: Children of each node in drawing order, -1 where there are no more, `[nodes,
            width]`.
        paths: Nodes on the way to each node, -1 where there are no more, `[nodes, depth]`.
        depths: Distance of each node from the root, `[nodes]`.
    """

    children: Int64[Tensor, "nodes width"]
    paths: Int64[Tensor, "nodes depth"]
    depths: Int64[Tensor, " nodes"]

    # Made once a shape: a copy to a device cannot be captured in a graph.
    @staticmethod
    @lru_cache(maxsize=256)
    def of(children: tuple[tuple[int, ...], ...], device: torch.device) -> "_TreeTensors":
        parents = [-1] * len(children)
        for node, own in enumerate(children):
            if any(not node < child < len(children) for child in own):
                raise ProposalMismatchError(
                    f"children of node {node}: got {own}; expected nodes from {node + 1} to "
                    f"{len(children) - 1}, a child after its parent"
                )
            for child in own:
                parents[child] = node
        return _TreeTensors(
            _table(children, device),
            _table([path_to(node, parents) for node in range(len(parents))], device),
            torch.tensor(depths_of(tuple(parents))).to(device, non_blocking=True),
        )


def _frozen(children: Children) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, children))


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Int64[Tensor, "rows width"]:
    width = max(map(len, rows))
    table = [[*row, *[-1] * (width - len(row))] for row in rows]
    flat = torch.tensor(table, dtype=torch.int64).reshape(len(rows), width)
    return flat.to(device, non_blocking=True)


class _Walk:
    """The way of each request down its tree.

    Attributes:
        node: The last accepted node, `[batch]`.
        is_open: True while the last token was a candidate, `[batch]`.
    """

    def __init__(self, children: Children, token_ids: Int64[Tensor, "batch nodes"]) -> None:
        if len(children) != token_ids.shape[1]:
            raise ProposalMismatchError(
                f"token_ids have {token_ids.shape[1]} nodes, but children has {len(children)}"
            )
        self._tensors = _TreeTensors.of(_frozen(children), token_ids.device)
        self._token_ids, self.depth = token_ids, self._tensors.paths.shape[1]
        self.node = torch.zeros_like(token_ids[:, 0])
        self.is_open = torch.ones_like(self.node, dtype=torch.bool)

    def follow(self, token: Int64[Tensor, " batch"]) -> None:
        """Go to the first child with the emitted token, and stop where there is none."""
        children = self._tensors.children[self.node]
        drawn = self._token_ids.gather(1, children.clamp_min(0))
        is_match = (children >= 0) & (drawn == token[:, None])
        first = is_match.to(torch.int8).argmax(1, keepdim=True)  # the first of equal values
        self.is_open = self.is_open & is_match.any(1)
        self.node = torch.where(self.is_open, children.gather(1, first).squeeze(1), self.node)

    def verified(
        self, next_token: Int64[Tensor, " batch"], used: Int64[Tensor, " batch"]
    ) -> Verified:
        return Verified(
            path=self._tensors.paths[self.node],
            num_accepted=self._tensors.depths[self.node],
            next_token=next_token,
            num_uniforms=used,
        )


def _check_uniforms(uniforms: Tensor, needed: int) -> None:
    if uniforms.shape[1] < needed:
        raise OptionError(
            f"uniforms: got {uniforms.shape[1]} a request; these trees need {needed}, one a node"
        )


def _next(
    uniforms: Float64[Tensor, "batch uniforms"], used: Int64[Tensor, " batch"]
) -> Float64[Tensor, " batch"]:
    """The next uniform of each request; requests that have used all of theirs do not read it."""
    return uniforms.gather(1, used.clamp_max(uniforms.shape[1] - 1)[:, None]).squeeze(1)


def _at_node(values: Tensor, node: Int64[Tensor, " batch"]) -> Tensor:
    """The row of each request's node, `[batch, columns]`."""
    index = node[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, index).squeeze(1)


def _draft_at(draft: DraftLaws, node: Int64[Tensor, " batch"]) -> tuple[Tensor, Tensor | None]:
    ids = None if draft.token_ids is None else _at_node(draft.token_ids, node)
    return _at_node(draft.probs, node), ids


def _draft_of(draft: DraftLaws, node: int) -> tuple[Tensor, Tensor | None]:
    return draft.probs[:, node], None if draft.token_ids is None else draft.token_ids[:, node]


def _mass(
    q: Float64[Tensor, "batch support"],
    ids: Int64[Tensor, "batch support"] | None,
    x: Int64[Tensor, "batch 1"],
) -> Float64[Tensor, " batch"]:
    return q.gather(1, x).squeeze(1) if ids is None else torch.where(ids == x, q, 0.0).sum(1)


def _without(
    q: Float64[Tensor, "batch support"],
    ids: Int64[Tensor, "batch support"] | None,
    x: Int64[Tensor, "batch 1"],
) -> Float64[Tensor, "batch support"]:
    rest = q.scatter(1, x, 0.0) if ids is None else torch.where(ids == x, 0.0, q)
    return rest / rest.sum(1, keepdim=True)


def _excess(
    scale: Float64[Tensor, " batch"],
    p: Float64[Tensor, "batch vocab"],
    q: Float64[Tensor, "batch support"],
    ids: Int64[Tensor, "batch support"] | None,
) -> tuple[Float64[Tensor, "batch vocab"], Float64[Tensor, " batch"]]:
    """`(scale p - q)_+`, not normalised, and its sum."""
    left = scale[:, None] * p
    rest = (left - q if ids is None else left.scatter_add(1, ids, -q)).clamp_min(0.0)
    return rest, rest.sum(1)


def _share(
    mass: Float64[Tensor, " batch"], scale: Float64[Tensor, " batch"]
) -> Float64[Tensor, " batch"]:
    """`S / (S + 1 - a)`; zero where both vanish, since a deeper token is then certain to be accepted."""
    undecided = mass + (1.0 - scale)
    return torch.where(undecided == 0.0, 0.0, mass / undecided)
