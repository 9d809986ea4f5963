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
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from monge.core.errors import OptionError, ProposalMismatchError
from monge.core.sampling_rules import probs_from_logits
from monge.core.tree import depths_of, path_to
from monge.verify.fast.scores import SMALLEST_MASS, Lines, Scores

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
    _check_uniforms(uniforms, 1 + sum(map(len, children)))
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
    num_fixed: Sequence[int] = (),
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
        uniforms: At least one a candidate and one more for each request.
        num_fixed: Number of deterministic candidates of each node, such as its most probable
            tokens. They come first, and q gives them no mass. Empty for none.
        replacement: Whether siblings are independent draws. Otherwise each was drawn from q without
            the tokens of its elder siblings.
    """
    _check_uniforms(uniforms, 1 + sum(map(len, children)))
    walk = _Walk(children, token_ids)
    tensors = _TreeTensors.of(_frozen(children), token_ids.device)
    ways = _Ways.of(_frozen(children), tuple(num_fixed), token_ids.device)
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
            mass = p.gather(1, x).squeeze(1)
            ratio = mass / _mass(q, ids, x)
            rest, total = _excess(torch.ones_like(ratio), p, q, ids)
            if place < ways.fixed.shape[1]:
                is_fixed = ways.fixed[walk.node, place] >= 0
                ratio = torch.where(is_fixed, mass, ratio)
                rest = torch.where(is_fixed[:, None], p.scatter(1, x, 0.0), rest)
                total = rest.sum(1)
            is_hit = is_tried & (_next(uniforms, used) < ratio)
            used = used + is_tried
            token = torch.where(is_hit, x.squeeze(1), token)
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
    *,
    num_fixed: Sequence[int] = (),
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
        num_fixed: As for `recursive_rejection`.
    """
    _check_uniforms(uniforms, 1 + sum(map(len, children)))
    fixed = _checked(_frozen(children), tuple(num_fixed))
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
        for place, child in enumerate(own):
            x, is_fixed = token_ids[:, child, None], place < fixed[node]
            mass = weight * p.gather(1, x).squeeze(1)
            below = mass.clamp_max(1.0) if is_fixed else (mass / _mass(q, ids, x)).clamp_max(1.0)
            visit(child, below, is_here & (accepted < 0) & ~(below == 0.0))
            is_going = is_here & (accepted < 0)
            if is_fixed:  # the point mass at x
                rest = (weight[:, None] * p).scatter(1, x, (mass - 1.0).clamp_min(0.0)[:, None])
                total, left = rest.sum(1), (weight - below).clamp_min(0.0)
            else:
                rest, total = _excess(weight, p, q, ids)
                left = total
            is_left = is_going & ~(total == 0.0)
            p = torch.where(is_left[:, None], rest / total[:, None], p)
            weight = torch.where(is_going, _share(left, weight), weight)
            if child != own[-1] and not is_fixed:
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


def optimal(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
    draft: DraftLaws,
    uniforms: Float64[Tensor, "batch uniforms"],
    *,
    num_fixed: Sequence[int] = (),
) -> Verified:
    """Verify trees of independent draws level by level, with the largest acceptance at each node.

    Laws of a few tokens are sorted in less time than whole ones.

    Reference:
        The project's own construction; see `monge.verify.optimal`.

    Args: As for `recursive_rejection`, with at least `num_uniforms(children)` uniforms a request.
    """
    _check_uniforms(uniforms, num_uniforms(children))
    walk = _Walk(children, token_ids)
    ways = _Ways.of(_frozen(children), tuple(num_fixed), token_ids.device)
    used = torch.zeros_like(walk.node)
    next_token = torch.full_like(walk.node, -1)
    for _ in range(walk.depth):
        p, (q, ids) = _at_node(probs, walk.node), _draft_at(draft, walk.node)
        drawn = ways.drawn[walk.node]
        count = (drawn >= 0).sum(1)
        x = _tokens(token_ids, drawn)
        first = x[:, :1].clamp_min(0)
        one = _next(uniforms, used) < p.gather(1, first).squeeze(1) / _mass(q, ids, first)
        winner = torch.where((count == 1) & one, 0, -1)
        ceiling, is_several = torch.ones_like(p[:, 0]), count > 1
        if x.shape[1] > 1:
            lines = Lines.build(_on(p, ids), q, count.clamp_min(2), x.shape[1])
            positions, swaps = _some(uniforms, used, 2 * x.shape[1]).unflatten(1, (-1, 2)).unbind(2)
            best = Scores.of(lines, _columns(x, q, ids), positions).winners(swaps)
            winner = torch.where(is_several, best, winner)
            ceiling = torch.where(is_several, lines.ceilings.squeeze(1), ceiling)
        used = used + walk.is_open * torch.where(is_several, 2 * count, count)
        rest = _below(p, _taken(_on(p, ids), q, ceiling, is_several), ids, p)
        rest = torch.where((count == 0)[:, None], p, rest)
        is_hit = winner >= 0
        won = x.gather(1, winner.clamp_min(0)[:, None]).squeeze(1)
        token = torch.where(is_hit, won, quantile(rest, _next(uniforms, used)))
        used = used + (walk.is_open & ~is_hit)
        next_token = torch.where(walk.is_open, token, next_token)
        walk.follow(token)
    bonus = quantile(_at_node(probs, walk.node), _next(uniforms, used))
    next_token = torch.where(walk.is_open, bonus, next_token)
    return walk.verified(next_token, used + walk.is_open)


def layer(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
    draft: DraftLaws,
    uniforms: Float64[Tensor, "batch uniforms"],
    *,
    num_fixed: Sequence[int] = (),
) -> Verified:
    """Verify trees of independent draws as a whole: the optimum of each node, lifted layer by layer.

    It accepts more than `optimal` from the second layer on, and is `block` for chains.

    Reference:
        Layer Verification; see `monge.verify.layer`.

    Args: As for `recursive_rejection`, with at least `num_uniforms(children)` uniforms a request.
    """
    shape = _frozen(children)
    ways = _Ways.of(shape, tuple(num_fixed), token_ids.device)
    if not ways.fixed.shape[1] and shape == children_of(range(-1, len(shape) - 1)):
        return block(probs, token_ids, draft, uniforms)
    _check_uniforms(uniforms, num_uniforms(children))
    found = _weigh(_Nodes(probs, token_ids, shape, ways.counts, draft), ways, uniforms)
    node, used = _stop(found, ways, uniforms)
    tensors, at = _TreeTensors.of(shape, token_ids.device), node[:, None]
    scale, ceiling = (one.gather(1, at).squeeze(1) for one in (found.scales, found.ceilings))
    p, (q, ids) = _at_node(probs, node), _draft_at(draft, node)
    left = scale[:, None] * p
    taken = _taken(_on(left, ids), q, ceiling, (ways.drawn[node] >= 0).sum(1) > 1)
    for x in _tokens(token_ids, ways.fixed[node]).split(1, dim=1):
        at = x.clamp_min(0)
        left = left.scatter(1, at, torch.where(x < 0, left.gather(1, at), 0.0))
    rest = _below(left, taken, ids, p)
    law = torch.where(tensors.children[node, :1] < 0, p, rest)
    token = quantile(law, _next(uniforms, used))
    return Verified(
        path=tensors.paths[node],
        num_accepted=tensors.depths[node],
        next_token=torch.where(found.is_bad, -1, token),
        num_uniforms=used + 1,
    )


class _Weighed(NamedTuple):
    """The pass of `layer` from the root down; see `verify/layer.py`.

    Attributes:
        weights: w of each node, `[batch, nodes]`.
        masses: Mass that each node keeps, `[batch, nodes]`.
        scales: s of the layer of each node, `[batch, nodes]`.
        ceilings: mu of each node, with `y = min(s p, mu q)`, `[batch, nodes]`.
        frees: f of each layer, `[batch, depths]`.
        used: Uniforms used, `[batch]`.
        is_bad: True where logits of a node with weight are not finite, `[batch]`.
    """

    weights: Float64[Tensor, "batch nodes"]
    masses: Float64[Tensor, "batch nodes"]
    scales: Float64[Tensor, "batch nodes"]
    ceilings: Float64[Tensor, "batch nodes"]
    frees: Float64[Tensor, "batch depths"]
    used: Int64[Tensor, " batch"]
    is_bad: Bool[Tensor, " batch"]


def _weigh(tree: "_Nodes", ways: "_Ways", uniforms: Float64[Tensor, "batch uniforms"]) -> _Weighed:
    nodes, one = range(len(ways.counts)), torch.ones_like(uniforms[:, 0])
    used, is_bad = torch.zeros_like(tree.token_ids[:, 0]), one < 0.0
    weights = dict.fromkeys(nodes, 0.0 * one) | {0: one}
    masses, scales, ceilings = dict(weights), dict.fromkeys(nodes, one), dict.fromkeys(nodes, one)
    frees = [one]
    for level in ways.order:
        parents = [node for node in level if tree.children[node]]
        scale = _in_order([weights[node] for node in parents], one).clamp_max(1.0)
        positions = dict[int, Tensor]()
        for node in parents:
            is_here, count = weights[node] > 0.0, ways.counts[node]
            is_bad = is_bad | (is_here & tree.probs[:, node, 0].isnan())
            if count > 1:
                positions[node] = _some(uniforms, used, count)
                used = used + count * is_here
        won, below = tree.won(scale, positions), list[Tensor]()
        for node in parents:
            is_here, part = weights[node] > 0.0, weights[node] / scale
            flow = tree.flow(scale, node, won.get(node))
            for child, prob in flow.accept_probs.items():
                weights[child] = masses[child] = torch.where(is_here, part * prob, 0.0)
                below.append(weights[child])
            rest = (weights[node] - part * flow.total).clamp_min(0.0)
            masses[node] = torch.where(is_here, rest, 0.0)
            scales[node], ceilings[node] = scale, flow.ceiling
        frees.append((1.0 - _in_order(below, one)).clamp_min(0.0))
    weighed, kept, scaled, highest = (
        torch.stack(list(one.values()), 1) for one in (weights, masses, scales, ceilings)
    )
    return _Weighed(weighed, kept, scaled, highest, torch.stack(frees, 1), used, is_bad)


def _stop(
    found: _Weighed, ways: "_Ways", uniforms: Float64[Tensor, "batch uniforms"]
) -> tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]:
    """The pass from the deepest layer up: the node that is stopped at, and the uniforms used."""
    used, layer, is_decided = found.used, torch.zeros_like(found.used), found.used < 0
    for depth in range(len(ways.order) - 1, 0, -1):
        mass = _in_order([found.masses[:, node] for node in ways.order[depth]], found.frees[:, 0])
        prob = torch.where(mass > 0.0, mass / (mass + found.frees[:, depth]), 0.0)
        weight = sum(found.weights[:, node] for node in ways.order[depth])
        is_asked = ~is_decided & (weight > 0.0)
        is_hit = is_asked & (_next(uniforms, used) < prob)
        used = used + is_asked
        layer = torch.where(is_hit, depth, layer)
        is_decided = is_decided | is_hit
    row = ways.layers[layer]
    at = row.clamp_min(0)
    is_there = (row >= 0) & (found.weights.gather(1, at) > 0.0)
    kept = torch.where(is_there, found.masses.gather(1, at), 0.0)
    is_several = (kept > 0.0).sum(1) > 1
    drawn = quantile(kept / kept.cumsum(1)[:, -1:], _next(uniforms, used))
    only = torch.where(is_there, kept, -1.0).argmax(1)
    place = torch.where(is_several, drawn, only).clamp_min(0)
    return row.gather(1, place[:, None]).squeeze(1), used + is_several


class _Flow(NamedTuple):
    """Flow of one node; see `Flow` in `verify/flow.py`.

    Attributes:
        accept_probs: pi of each child, `[batch]`.
        total: Mass of y, `[batch]`.
        ceiling: mu of `y = min(s p, mu q)` on the support of q, `[batch]`.
    """

    accept_probs: dict[int, Tensor]
    total: Float64[Tensor, " batch"]
    ceiling: Float64[Tensor, " batch"]


class _Nodes(NamedTuple):
    """Arguments of `layer`, and the number of drawn children of each node."""

    probs: Float64[Tensor, "batch nodes vocab"]
    token_ids: Int64[Tensor, "batch nodes"]
    children: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    draft: DraftLaws

    def won(
        self, scale: Float64[Tensor, " batch"], positions: dict[int, Float64[Tensor, "batch draws"]]
    ) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Of nodes of a layer with several draws: chances of the draws, y of the support of q, and mu."""
        if not positions:
            return {}
        size = max(one.shape[1] for one in positions.values())
        rows = list[tuple[Tensor, ...]]()
        for node, own in positions.items():
            q, ids = _draft_of(self.draft, node)
            x = self._tokens(self.children[node][-own.shape[1] :])
            p = _on(scale[:, None] * self.probs[:, node], ids)
            columns = _wide(_columns(x, q, ids), size, -1)
            width = torch.full_like(x[:, 0], own.shape[1])
            rows.append((p, q, width, columns, _wide(own, size, 0.0)))
        p, q, widths, columns, at = (torch.cat(one) for one in zip(*rows, strict=True))
        lines = Lines.build(p, q, widths, size)
        found = Scores.of(lines, columns, at).win_probs(), lines.masses, lines.ceilings.squeeze(1)
        parts = zip(*(one.chunk(len(rows)) for one in found), strict=True)
        return dict(zip(positions, parts, strict=True))

    def flow(
        self,
        scale: Float64[Tensor, " batch"],
        node: int,
        won: tuple[Tensor, Tensor, Tensor] | None,
    ) -> _Flow:
        own, one = self.children[node], torch.ones_like(scale)
        fixed, drawn = own[: len(own) - self.counts[node]], own[len(own) - self.counts[node] :]
        p, (q, ids) = self.probs[:, node], _draft_of(self.draft, node)
        due = {
            child: scale * p.gather(1, self._tokens([child])).squeeze(1)
            for child in dict.fromkeys(own)
        }
        accept = dict.fromkeys(due, 0.0 * one)
        if not drawn:
            masses = torch.stack(list(due.values()), 1)
            order = self._tokens(fixed).argsort(1)
            return _Flow(due, masses.gather(1, order).cumsum(1)[:, -1], 0.0 * one)
        if won is None:  # one draw
            (child,), ceiling = drawn, one
            masses = torch.minimum(scale[:, None] * _on(p, ids), q)
            accept[child] = (due[child] / _mass(q, ids, self._tokens(drawn))).clamp_max(1.0)
            rejected, refused = 1.0 - accept[child], (q - masses).cumsum(1)[:, -1]
        else:
            chances, masses, ceiling = won
            for place, child in enumerate(drawn):
                accept[child] = accept[child] + chances[:, place]
            rejected = (1.0 - _in_order(list(accept.values()), one)).clamp_min(0.0)
            refused = 1.0 - masses.cumsum(1)[:, -1]
        for child in fixed:
            share = rejected * (due[child] / refused).clamp_max(1.0)
            accept[child] = torch.where((due[child] > 0.0) & (refused > 0.0), share, 0.0)
        if fixed:
            x, whole = self._tokens(fixed), torch.stack([due[child] for child in fixed], 1)
            if ids is None:
                masses = masses.scatter(1, x, whole)
            else:
                order = torch.cat([ids, x], 1).argsort(1)
                masses = torch.cat([masses, whole], 1).gather(1, order)
        return _Flow(accept, masses.cumsum(1)[:, -1], ceiling)

    def _tokens(self, nodes: Sequence[int]) -> Int64[Tensor, "batch some"]:
        return torch.stack([self.token_ids[:, node] for node in nodes], 1)


def num_uniforms(children: Children) -> int:
    """Return the most uniforms that any of the functions uses for a tree of this shape.

    That is two a candidate, one for the candidates of a node, and one for the token after them.
    """
    return 1 + sum(2 * len(own) + 1 for own in children if own)


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


class _Ways(NamedTuple):
    """How the children of a tree were drawn, on a device.

    Attributes:
        fixed: Deterministic children of each node, -1 where there are no more, `[nodes, fixed]`.
        drawn: Drawn children in the same form, repeats kept, `[nodes, draws]`.
        layers: Nodes of each depth, leaves first, in the same form, `[depths, nodes]`.
        counts: Number of drawn children of each node.
        order: `layers` as numbers.
    """

    fixed: Int64[Tensor, "nodes fixed"]
    drawn: Int64[Tensor, "nodes draws"]
    layers: Int64[Tensor, "depths most"]
    counts: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(
        children: tuple[tuple[int, ...], ...], num_fixed: tuple[int, ...], device: torch.device
    ) -> "_Ways":
        fixed = _checked(children, num_fixed)
        pairs = list(zip(children, fixed, strict=True))
        order = tuple(
            tuple(sorted(level, key=lambda node: bool(children[node])))
            for level in _levels(children)
        )
        return _Ways(
            _table([own[:count] for own, count in pairs], device),
            _table([own[count:] for own, count in pairs], device),
            _table(order, device),
            tuple(len(own) - count for own, count in pairs),
            order,
        )


def _checked(children: tuple[tuple[int, ...], ...], num_fixed: tuple[int, ...]) -> tuple[int, ...]:
    fixed = num_fixed or (0,) * len(children)
    if len(fixed) != len(children) or any(
        not 0 <= count <= len(own) for own, count in zip(children, fixed, strict=False)
    ):
        raise ProposalMismatchError(
            f"num_fixed: got {num_fixed}; expected a number for each of {len(children)} nodes, no "
            "more than it has children"
        )
    return fixed


def _levels(children: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Nodes of each depth, siblings side by side."""
    levels = [[0]]
    while below := [child for node in levels[-1] for child in dict.fromkeys(children[node])]:
        levels.append(below)
    return levels


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
        raise OptionError(f"uniforms: got {uniforms.shape[1]} a request; these trees need {needed}")


def _next(
    uniforms: Float64[Tensor, "batch uniforms"], used: Int64[Tensor, " batch"]
) -> Float64[Tensor, " batch"]:
    """The next uniform of each request; requests that have used all of theirs do not read it."""
    return uniforms.gather(1, used.clamp_max(uniforms.shape[1] - 1)[:, None]).squeeze(1)


def _some(
    uniforms: Float64[Tensor, "batch uniforms"], used: Int64[Tensor, " batch"], count: int
) -> Float64[Tensor, "batch some"]:
    """The next uniforms of each request."""
    at = used[:, None] + torch.arange(count, device=used.device)
    return uniforms.gather(1, at.clamp_max(uniforms.shape[1] - 1))


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


def _on(
    p: Float64[Tensor, "batch vocab"], ids: Int64[Tensor, "batch support"] | None
) -> Float64[Tensor, "batch support"]:
    """Masses of p on the support of q."""
    return p if ids is None else p.gather(1, ids)


def _tokens(
    token_ids: Int64[Tensor, "batch nodes"], nodes: Int64[Tensor, "batch some"]
) -> Int64[Tensor, "batch some"]:
    """Tokens of nodes, -1 where there is none."""
    return torch.where(nodes < 0, -1, token_ids.gather(1, nodes.clamp_min(0)))


def _columns(
    x: Int64[Tensor, "batch draws"],
    q: Float64[Tensor, "batch support"],
    ids: Int64[Tensor, "batch support"] | None,
) -> Int64[Tensor, "batch draws"]:
    """Places of drawn tokens in the support of q, -1 where there is none."""
    if ids is None:
        return x
    is_it = (ids[:, None] == x[:, :, None]) & (q > 0.0)[:, None]
    return torch.where(x < 0, -1, is_it.to(torch.int8).argmax(2))


def _wide(rows: Tensor, size: int, value: float | int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, size - rows.shape[1]), value=value)


def _in_order(masses: list[Tensor], like: Tensor) -> Tensor:
    """The sum as `total_of` of the rules adds."""
    return reduce(torch.add, masses, 0.0 * like)


def _taken(
    left: Float64[Tensor, "batch support"],
    q: Float64[Tensor, "batch support"],
    ceiling: Float64[Tensor, " batch"],
    is_several: Bool[Tensor, " batch"],
) -> Float64[Tensor, "batch support"]:
    """`y = min(s p, mu q)`; of several draws, those of tiny masses are never accepted."""
    least = torch.where(is_several, SMALLEST_MASS, 0.0 * ceiling)[:, None]
    return torch.where(q > least, torch.minimum(left, ceiling[:, None] * q), 0.0)


def _below(
    left: Float64[Tensor, "batch vocab"],
    taken: Float64[Tensor, "batch support"],
    ids: Int64[Tensor, "batch support"] | None,
    otherwise: Float64[Tensor, "batch vocab"],
) -> Float64[Tensor, "batch vocab"]:
    """`s p - y`, normalised; another law where nothing is left."""
    rest = (left - taken if ids is None else left.scatter_add(1, ids, -taken)).clamp_min(0.0)
    total = rest.sum(1, keepdim=True)
    return torch.where(total == 0.0, otherwise, rest / total)


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
