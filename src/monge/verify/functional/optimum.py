"""The optimum of each node, and of whole trees layer by layer."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.verify.functional.lines import SMALLEST_MASS, Lines, Scores
from monge.verify.functional.rejection import block
from monge.verify.functional.tensors import (
    BatchWalk,
    Children,
    DraftLaws,
    TreeTensors,
    Verified,
    Ways,
    at_node,
    check_uniforms,
    children_of,
    draft_at,
    draft_of,
    frozen,
    next_uniform,
    next_uniforms,
    num_uniforms,
    quantile,
)
from monge.verify.functional.where import RowLaws


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

    Laws of a few tokens take less time to sort than laws of the whole vocabulary.

    Reference:
        The project's own construction; see `monge.verify.optimal`.

    Args: As for `recursive_rejection`, with at least `num_uniforms(children)` uniforms a request.
    """
    check_uniforms(uniforms, num_uniforms(children))
    walk = BatchWalk(children, token_ids)
    ways = Ways.of(frozen(children), tuple(num_fixed), token_ids.device)
    used = torch.zeros_like(walk.node)
    next_token = torch.full_like(walk.node, -1)
    for _ in range(walk.depth):
        p, (q, ids) = at_node(probs, walk.node), draft_at(draft, walk.node)
        drawn = ways.drawn[walk.node]
        count = (drawn >= 0).sum(1)
        x = _tokens(token_ids, drawn)
        first = x[:, 0]
        ratio = RowLaws(p).prob(first) / RowLaws(q, ids).prob(first)
        is_accepted = next_uniform(uniforms, used) < ratio
        winner = torch.where((count == 1) & is_accepted, 0, -1)
        ceiling, is_several = torch.ones_like(p[:, 0]), count > 1
        if x.shape[1] > 1:
            lines = Lines.build(_on(p, ids), q, count.clamp_min(2), x.shape[1])
            positions, swaps = (
                next_uniforms(uniforms, used, 2 * x.shape[1]).unflatten(1, (-1, 2)).unbind(2)
            )
            best = Scores.of(lines, _columns(x, q, ids), positions).winners(swaps)
            winner = torch.where(is_several, best, winner)
            ceiling = torch.where(is_several, lines.ceilings.squeeze(1), ceiling)
        used = used + walk.is_open * torch.where(is_several, 2 * count, count)
        rest = _below(p, _taken(_on(p, ids), q, ceiling, is_several), ids, p)
        rest = torch.where((count == 0)[:, None], p, rest)
        is_hit = winner >= 0
        won = x.gather(1, winner.clamp_min(0)[:, None]).squeeze(1)
        token = torch.where(is_hit, won, quantile(rest, next_uniform(uniforms, used)))
        used = used + (walk.is_open & ~is_hit)
        next_token = torch.where(walk.is_open, token, next_token)
        walk.follow(token)
    bonus = quantile(at_node(probs, walk.node), next_uniform(uniforms, used))
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
    shape = frozen(children)
    ways = Ways.of(shape, tuple(num_fixed), token_ids.device)
    if not ways.fixed.shape[1] and shape == children_of(range(-1, len(shape) - 1)):
        return block(probs, token_ids, draft, uniforms)
    check_uniforms(uniforms, num_uniforms(children))
    weighed = _weigh(_Nodes(probs, token_ids, shape, ways.counts, draft), ways, uniforms)
    node, used = _stop(weighed, ways, uniforms)
    tensors, at = TreeTensors.of(shape, token_ids.device), node[:, None]
    scale, ceiling = (one.gather(1, at).squeeze(1) for one in (weighed.scales, weighed.ceilings))
    p, (q, ids) = at_node(probs, node), draft_at(draft, node)
    left = scale[:, None] * p
    taken = _taken(_on(left, ids), q, ceiling, (ways.drawn[node] >= 0).sum(1) > 1)
    for x in _tokens(token_ids, ways.fixed[node]).split(1, dim=1):
        at = x.clamp_min(0)
        left = left.scatter(1, at, torch.where(x < 0, left.gather(1, at), 0.0))
    rest = _below(left, taken, ids, p)
    law = torch.where(tensors.children[node, :1] < 0, p, rest)
    token = quantile(law, next_uniform(uniforms, used))
    return Verified(
        path=tensors.paths[node],
        num_accepted=tensors.depths[node],
        next_token=torch.where(weighed.is_bad, -1, token),
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


def _weigh(tree: "_Nodes", ways: "Ways", uniforms: Float64[Tensor, "batch uniforms"]) -> _Weighed:
    nodes, by_node = range(len(ways.counts)), torch.ones_like(uniforms[:, 0])
    used, is_bad = torch.zeros_like(tree.token_ids[:, 0]), by_node < 0.0
    weights = dict.fromkeys(nodes, 0.0 * by_node) | {0: by_node}
    masses, scales, ceilings = (
        dict(weights),
        dict.fromkeys(nodes, by_node),
        dict.fromkeys(nodes, by_node),
    )
    frees = [by_node]
    for level in ways.order:
        parents = [node for node in level if tree.children[node]]
        scale = _in_order([weights[node] for node in parents], by_node).clamp_max(1.0)
        positions = dict[int, Tensor]()
        for node in parents:
            is_here, count = weights[node] > 0.0, ways.counts[node]
            is_bad = is_bad | (is_here & tree.probs[:, node, 0].isnan())
            if count > 1:
                positions[node] = next_uniforms(uniforms, used, count)
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
        frees.append((1.0 - _in_order(below, by_node)).clamp_min(0.0))
    weighed, kept, scaled, highest = (
        torch.stack(list(one.values()), 1) for one in (weights, masses, scales, ceilings)
    )
    return _Weighed(weighed, kept, scaled, highest, torch.stack(frees, 1), used, is_bad)


def _stop(
    found: _Weighed, ways: "Ways", uniforms: Float64[Tensor, "batch uniforms"]
) -> tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]:
    """The pass from the deepest layer up: the node that is stopped at, and the uniforms used."""
    used, layer, is_decided = found.used, torch.zeros_like(found.used), found.used < 0
    for depth in range(len(ways.order) - 1, 0, -1):
        mass = _in_order([found.masses[:, node] for node in ways.order[depth]], found.frees[:, 0])
        prob = torch.where(mass > 0.0, mass / (mass + found.frees[:, depth]), 0.0)
        weight = sum(found.weights[:, node] for node in ways.order[depth])
        is_asked = ~is_decided & (weight > 0.0)
        is_hit = is_asked & (next_uniform(uniforms, used) < prob)
        used = used + is_asked
        layer = torch.where(is_hit, depth, layer)
        is_decided = is_decided | is_hit
    row = ways.layers[layer]
    at = row.clamp_min(0)
    is_there = (row >= 0) & (found.weights.gather(1, at) > 0.0)
    kept = torch.where(is_there, found.masses.gather(1, at), 0.0)
    is_several = (kept > 0.0).sum(1) > 1
    drawn = quantile(kept / kept.cumsum(1)[:, -1:], next_uniform(uniforms, used))
    only = torch.where(is_there, kept, -1.0).argmax(1)
    place = torch.where(is_several, drawn, only).clamp_min(0)
    return row.gather(1, place[:, None]).squeeze(1), used + is_several


class _Flow(NamedTuple):
    """Flow of a node; see `Flow` in `verify/flow.py`.

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
        size = max(values.shape[1] for values in positions.values())
        rows = list[tuple[Tensor, ...]]()
        for node, values in positions.items():
            q, ids = draft_of(self.draft, node)
            x = self._tokens(self.children[node][-values.shape[1] :])
            p = _on(scale[:, None] * self.probs[:, node], ids)
            columns = _wide(_columns(x, q, ids), size, -1)
            width = torch.full_like(x[:, 0], values.shape[1])
            rows.append((p, q, width, columns, _wide(values, size, 0.0)))
        p, q, widths, columns, at = (torch.cat(parts) for parts in zip(*rows, strict=True))
        lines = Lines.build(p, q, widths, size)
        results = Scores.of(lines, columns, at).win_probs(), lines.masses, lines.ceilings.squeeze(1)
        parts = zip(*(result.chunk(len(rows)) for result in results), strict=True)
        return dict(zip(positions, parts, strict=True))

    def flow(
        self,
        scale: Float64[Tensor, " batch"],
        node: int,
        won: tuple[Tensor, Tensor, Tensor] | None,
    ) -> _Flow:
        children, certain = self.children[node], torch.ones_like(scale)
        fixed, drawn = (
            children[: len(children) - self.counts[node]],
            children[len(children) - self.counts[node] :],
        )
        p, (q, ids) = self.probs[:, node], draft_of(self.draft, node)
        due = {
            child: scale * p.gather(1, self._tokens([child])).squeeze(1)
            for child in dict.fromkeys(children)
        }
        accept = dict.fromkeys(due, 0.0 * certain)
        if not drawn:
            masses = torch.stack(list(due.values()), 1)
            order = self._tokens(fixed).argsort(1)
            return _Flow(due, masses.gather(1, order).cumsum(1)[:, -1], 0.0 * certain)
        if won is None:  # one draw
            (child,), ceiling = drawn, certain
            masses = torch.minimum(scale[:, None] * _on(p, ids), q)
            accept[child] = (
                due[child] / RowLaws(q, ids).prob(self._tokens(drawn)[:, 0])
            ).clamp_max(1.0)
            rejected, refused = 1.0 - accept[child], (q - masses).cumsum(1)[:, -1]
        else:
            chances, masses, ceiling = won
            for place, child in enumerate(drawn):
                accept[child] = accept[child] + chances[:, place]
            rejected = (1.0 - _in_order(list(accept.values()), certain)).clamp_min(0.0)
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
    is_found, places = is_it.to(torch.int8).max(2)
    return torch.where(is_found > 0, places, -1)


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
