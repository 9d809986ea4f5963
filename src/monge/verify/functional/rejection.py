"""Exact match, the target walk, and rules that accept or reject drawn candidates."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from monge.verify.functional.tensors import (
    Children,
    DraftLaws,
    TreeTensors,
    Verified,
    Walk,
    Ways,
    at_node,
    check_uniforms,
    checked_fixed,
    children_of,
    draft_at,
    draft_of,
    excess,
    frozen,
    mass_of,
    next_uniform,
    quantile,
    without,
)


def exact_match(
    logits: Float[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
) -> Verified:
    """Verify drafts of greedy decoding, of any origin: follow the target's most probable tokens.

    Args:
        logits: The target's logits after every node.
        token_ids: As for `target_walk`.
        children: Children of each node.
    """
    largest, best = logits.max(-1)
    best = torch.where(largest.isfinite(), best, -1)
    walk = Walk(children, token_ids)
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
        token_ids: Tokens of the nodes; negative for nodes that a smaller tree does not have.
        children: Children of each node.
        uniforms: At least the depth of the tree and one more for each request.
    """
    check_uniforms(uniforms, 1 + sum(map(len, children)))
    walk = Walk(children, token_ids)
    token = next_token = quantile(at_node(probs, walk.node), uniforms[:, 0])
    used = torch.ones_like(walk.node)
    for level in range(walk.depth):
        walk.follow(token)
        token = quantile(at_node(probs, walk.node), uniforms[:, level + 1])
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
    check_uniforms(uniforms, 1 + sum(map(len, children)))
    walk = Walk(children, token_ids)
    tensors = TreeTensors.of(frozen(children), token_ids.device)
    ways = Ways.of(frozen(children), tuple(num_fixed), token_ids.device)
    used = torch.zeros_like(walk.node)
    law = at_node(probs, walk.node)
    for _ in range(walk.depth):
        p, (q, ids) = law, draft_at(draft, walk.node)
        siblings = tensors.children[walk.node]
        token = torch.full_like(walk.node, -1)
        for place in range(siblings.shape[1]):
            child = siblings[:, place]
            x = token_ids.gather(1, child.clamp_min(0)[:, None])
            is_tried = walk.is_open & (child >= 0) & (token < 0)
            mass = p.gather(1, x).squeeze(1)
            ratio = mass / mass_of(q, ids, x)
            rest, total = excess(torch.ones_like(ratio), p, q, ids)
            if place < ways.fixed.shape[1]:
                is_fixed = ways.fixed[walk.node, place] >= 0
                ratio = torch.where(is_fixed, mass, ratio)
                rest = torch.where(is_fixed[:, None], p.scatter(1, x, 0.0), rest)
                total = rest.sum(1)
            is_hit = is_tried & (next_uniform(uniforms, used) < ratio)
            used = used + is_tried
            token = torch.where(is_hit, x.squeeze(1), token)
            # Nothing is left only where x was certain to be accepted.
            is_left = is_tried & ~is_hit & ~(total == 0.0)
            p = torch.where(is_left[:, None], rest / total[:, None], p)
            if not replacement:
                q = torch.where((is_tried & ~is_hit)[:, None], without(q, ids, x), q)
        law = torch.where(walk.is_open[:, None], p, law)
        walk.follow(token)
        law = torch.where(walk.is_open[:, None], at_node(probs, walk.node), law)
    return walk.verified(quantile(law, next_uniform(uniforms, used)), used + 1)


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
        token_ids: Tokens of the nodes; negative for nodes that a shorter chain does not have.
        draft: q of every node.
        uniforms: At least as many as nodes for each request.
    """
    check_uniforms(uniforms, probs.shape[1])
    depth, batch = probs.shape[1] - 1, len(probs)
    is_there = token_ids[:, 1:] >= 0
    lengths = is_there.sum(1)
    x = token_ids[:, 1:].clamp_min(0)
    # All nodes in one call each; only the scales need their elders.
    p, (q, ids) = probs[:, :depth].flatten(0, 1), _each_node(draft, depth)
    ratios = p.gather(1, x.reshape(-1, 1)).squeeze(1).view(batch, depth)
    drawn = mass_of(q, ids, x.reshape(-1, 1)).view(batch, depth)
    scales = [torch.ones_like(probs[:, 0, 0])]
    for node in range(depth):
        ratio = scales[-1] * ratios[:, node] / drawn[:, node]
        # A token with a = 0 is not accepted, nor is any after it.
        scales.append(torch.where(scales[-1] > 0.0, ratio.clamp_max(1.0), scales[-1]))
    scale = torch.stack(scales, 1)
    masses = excess(scale[:, :depth].flatten(), p, q, ids)[1].view(batch, depth)
    # From each end of the accepted path, the deepest first. The mass after the last token is not asked.
    ends, levels = scale[:, 1:].flip(1), torch.arange(depth, 0, -1, device=x.device)
    below = torch.cat([masses[:, 1:], torch.zeros_like(scale[:, :1])], 1).flip(1)[:, :depth]
    prob = torch.where(levels == lengths[:, None], ends, _share(below, ends))
    is_asked = is_there.flip(1) & ~(ends == 0.0)
    order = is_asked.cumsum(1)
    # A scale is NaN below a node whose logits are not finite: the request ends there.
    is_hit = is_asked & ~(uniforms.gather(1, (order - 1).clamp_min(0)) >= prob)
    # The number of the deepest hit, or 0.
    accepted = torch.where(is_hit, levels, 0).amax(1) if depth else lengths
    used = torch.where(is_asked & (levels >= accepted[:, None]), 1, 0).sum(1)
    at = accepted.clamp_max(max(depth - 1, 0))
    law, own = at_node(probs, accepted), scale.gather(1, accepted[:, None]).squeeze(1)
    rest, total = excess(own, law, *draft_at(draft, at))
    is_rest = (accepted < lengths) & ~(total == 0.0)
    law = torch.where(is_rest[:, None], rest / total[:, None], law) + 0.0 * own[:, None]
    next_token = quantile(law, next_uniform(uniforms, used))
    levels = levels.flip(0)
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
    check_uniforms(uniforms, 1 + sum(map(len, children)))
    fixed = checked_fixed(frozen(children), tuple(num_fixed))
    tensors = TreeTensors.of(frozen(children), token_ids.device)
    used = torch.zeros_like(token_ids[:, 0])
    accepted = torch.full_like(used, -1)
    law = probs[:, 0]

    def visit(
        node: int, weight: Float64[Tensor, " batch"], is_here: Bool[Tensor, " batch"]
    ) -> None:
        nonlocal used, accepted, law
        p, (q, ids) = probs[:, node], draft_of(draft, node)
        own = tuple(dict.fromkeys(children[node]))
        for place, child in enumerate(own):
            x, is_fixed = token_ids[:, child, None], place < fixed[node]
            mass = weight * p.gather(1, x).squeeze(1)
            below = mass.clamp_max(1.0) if is_fixed else (mass / mass_of(q, ids, x)).clamp_max(1.0)
            visit(child, below, is_here & (accepted < 0) & ~(below == 0.0))
            is_going = is_here & (accepted < 0)
            if is_fixed:  # the point mass at x
                rest = (weight[:, None] * p).scatter(1, x, (mass - 1.0).clamp_min(0.0)[:, None])
                total, left = rest.sum(1), (weight - below).clamp_min(0.0)
            else:
                rest, total = excess(weight, p, q, ids)
                left = total
            is_left = is_going & ~(total == 0.0)
            p = torch.where(is_left[:, None], rest / total[:, None], p)
            weight = torch.where(is_going, _share(left, weight), weight)
            if child != own[-1] and not is_fixed:
                q = without(q, ids, x)
        is_asked = is_here & (accepted < 0)
        is_hit = is_asked if node == 0 else is_asked & ~(next_uniform(uniforms, used) >= weight)
        if node:
            used = used + is_asked
        accepted = torch.where(is_hit, node, accepted)
        # A weight is NaN below a node whose logits are not finite.
        law = torch.where(is_hit[:, None], p + 0.0 * weight[:, None], law)

    visit(0, torch.ones_like(law[:, 0]), accepted < 0)
    return Verified(
        path=tensors.paths[accepted],
        num_accepted=tensors.depths[accepted],
        next_token=quantile(law, next_uniform(uniforms, used)),
        num_uniforms=used + 1,
    )


def _each_node(draft: DraftLaws, count: int) -> tuple[Tensor, Tensor | None]:
    """Return draft masses and their tokens at the first nodes of all requests, a row each."""
    ids = None if draft.token_ids is None else draft.token_ids[:, :count].flatten(0, 1)
    return draft.probs[:, :count].flatten(0, 1), ids


def _share(
    mass: Float64[Tensor, "*batch"], scale: Float64[Tensor, "*batch"]
) -> Float64[Tensor, "*batch"]:
    """`S / (S + 1 - a)`; zero where both vanish, since a deeper token is then certain to be accepted."""
    undecided = mass + (1.0 - scale)
    return torch.where(undecided == 0.0, 0.0, mass / undecided)
