"""Exact match, sample and match, and rules that accept or reject drawn candidates.

`rejection`, `whole_chain` and `leaves_first` are the single source of their rules: the objects call
them for a request on the host, and the functions here for a batch on a device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from monge.verify.functional.tensors import (
    BatchWalk,
    Children,
    DraftLaws,
    TreeTensors,
    Verified,
    Ways,
    at_node,
    checked_fixed,
    children_of,
    draft_at,
    draft_of,
    frozen,
)
from monge.verify.functional.where import (
    AnyLaw,
    Mask,
    RowLaws,
    RuleDraws,
    Token,
    Uniforms,
    Value,
    at_most,
    batch_draws,
    excess,
    offers,
    or_point,
    pick,
    share,
    without,
)


def rejection(
    p: AnyLaw,
    q: AnyLaw,
    candidates: Sequence[Token],
    is_fixed: Sequence[Mask],
    draws: RuleDraws,
    *,
    is_open: Mask,
    replacement: bool = True,
) -> tuple[Token, AnyLaw]:
    """Try the candidates of a node in turn, each against what the rejections have left of p.

    Args:
        p: Target law.
        q: Draft law of the drawn candidates.
        candidates: Tokens in drawing order, -1 where a request has no more.
        is_fixed: Whether each of the first candidates is deterministic; no later candidate is.
        draws: Source of randomness.
        is_open: Requests at which the rule is applied.
        replacement: Whether the candidates are independent draws.

    Returns:
        The accepted token, or -1, and what is left of p.
    """
    token = -1
    for place, x in enumerate(candidates):
        law = or_point(q, is_fixed[place], x) if place < len(is_fixed) else q
        is_tried = is_open & (x >= 0)
        is_hit = draws.bernoulli(p.prob(x) / law.prob(x), is_tried)
        token, is_open = pick(is_hit, x, token), is_open & ~is_hit
        is_rejected = is_open & is_tried
        if not draws.needed(is_rejected):
            break
        # Nothing is left only where x was certain to be accepted.
        p = pick(is_rejected, excess(1.0, p, law), p)
        if not replacement and place + 1 < len(candidates):
            q = pick(is_rejected, without(q, x), q)
    return token, p


@runtime_checkable
class ChainProblem(Protocol):
    """A chain of drafted tokens, for `whole_chain`: on the host, or of each request of a batch."""

    @property
    def depth(self) -> int:
        """Drafted tokens of the longest chain."""
        ...

    @property
    def is_open(self) -> Mask:
        """True for every request."""
        ...

    @property
    def whole(self) -> Value:
        """The number 1."""
        ...

    def ratio(self, place: int) -> Value:
        """Return `p(x) / q(x)` of a drafted token. Places in the chain count from 0."""
        ...

    def weighed(self, scales: Sequence[Value]) -> Callable[[int], Value]:
        """Return the function that gives h_i for i = 1 .. the length of the chain."""
        ...

    def has(self, count: int) -> Mask:
        """Return whether a chain has at least `count` drafted tokens."""
        ...

    def left(self, count: Token, scales: Sequence[Value]) -> AnyLaw:
        """The law of the token after the first `count`: p at the end, else `(a p - q)_+`."""
        ...


def whole_chain(chain: ChainProblem, draws: RuleDraws) -> tuple[Token, Token]:
    """Decide a whole drafted chain from its end: Block Verification, Algorithm 2; see `monge.verify.block`.

    Returns:
        The number of accepted tokens, and the token after them.
    """
    scales = [chain.whole]
    for place in range(chain.depth):
        # A token with a = 0 is not accepted, nor is any after it.
        is_going = scales[-1] > 0.0
        if not draws.needed(is_going):
            break
        scale = at_most(1.0, scales[-1] * chain.ratio(place))
        scales.append(pick(is_going, scale, scales[-1]))
    share_at, is_open = chain.weighed(scales), chain.is_open
    accepted = pick(is_open, 0, 0)
    for count in range(len(scales) - 1, 0, -1):
        is_asked = is_open & chain.has(count) & (scales[count] != 0.0)
        if draws.needed(is_asked):
            is_hit = draws.bernoulli(share_at(count), is_asked)
            accepted, is_open = pick(is_hit, count, accepted), is_open & ~is_hit
    return accepted, draws.categorical(chain.left(accepted, scales), chain.is_open)


@runtime_checkable
class TreeProblem(Protocol):
    """A tree of candidates, for `leaves_first`: on the host, or of each request of a batch."""

    @property
    def is_open(self) -> Mask:
        """True for every request."""
        ...

    @property
    def whole(self) -> Value:
        """The number 1."""
        ...

    def target(self, node: int) -> AnyLaw:
        """P after a node."""
        ...

    def offers(self, node: int) -> Iterable[tuple[int, tuple[Token, AnyLaw]]]:
        """Yield the distinct children of a node, each with its token and law; see `where.offers`."""
        ...

    def size(self, node: int) -> int:
        """Return the number of distinct nodes from a node on."""
        ...


def leaves_first(tree: TreeProblem, draws: RuleDraws) -> tuple[Token, Token]:
    """Decide a tree from its leaves to its root: Traversal Verification; see `monge.verify.traversal`.

    Returns:
        The accepted node, and the token after it.
    """
    accepted, law = pick(tree.is_open, -1, -1), tree.target(0)

    def visit(node: int, weight: Value, is_here: Mask) -> None:
        nonlocal accepted, law
        p = tree.target(node)
        for child, (x, q) in tree.offers(node):
            below = at_most(1.0, weight * p.prob(x) / q.prob(x))
            is_asked = is_here & (below != 0.0)
            if draws.needed(is_asked):
                visit(child, below, is_asked)
            # Rounding decides between a weight of 0 and one of 1e-17. Both use the same draws.
            is_skipped = is_here & (below == 0.0)
            if draws.needed(is_skipped):
                draws.skip(tree.size(child), is_skipped)
            is_here = is_here & (accepted < 0)
            if not draws.needed(is_here):
                return
            rest = excess(weight, p, q)
            weight = pick(is_here, share(rest.mass, weight), weight)
            p = pick(is_here, rest, p)
        # The root is accepted in the end: its weight is one.
        is_hit = draws.bernoulli(weight, is_here) if node else is_here
        accepted, law = pick(is_hit, node, accepted), pick(is_hit, p, law)

    visit(0, tree.whole, tree.is_open)
    return accepted, draws.categorical(law, tree.is_open)


def subtree_size(children: Children, node: int) -> int:
    """Return the number of distinct nodes from a node on."""
    return 1 + sum(subtree_size(children, child) for child in dict.fromkeys(children[node]))


def exact_match(
    logits: Float[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
) -> Verified:
    """Verify drafts of greedy decoding, of any origin: follow the target's most probable tokens.

    Args:
        logits: The target's logits after every node.
        token_ids: As for `sample_and_match`.
        children: Children of each node.
    """
    largest, best = logits.max(-1)
    best = torch.where(largest.isfinite(), best, -1)
    walk = BatchWalk(children, token_ids)
    for _ in range(walk.depth):
        walk.follow(best.gather(1, walk.node[:, None]).squeeze(1))
    return walk.verified(best.gather(1, walk.node[:, None]).squeeze(1), 0 * walk.node)


def sample_and_match(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
    uniforms: Uniforms,
) -> Verified:
    """Verify candidates of any origin: draw from p, and go on from the candidate that was drawn.

    The optimum for deterministic candidates, such as looked-up text or most probable tokens; see
    `monge.verify.sample_and_match`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes; negative for nodes that a smaller tree does not have.
        children: Children of each node.
        uniforms: At least the depth of the tree plus 1 for each request.
    """
    draws = batch_draws(uniforms, 1 + sum(map(len, children)))
    walk = BatchWalk(children, token_ids)
    token = next_token = draws.categorical(RowLaws(at_node(probs, walk.node)), walk.is_open)
    for _ in range(walk.depth):
        walk.follow(token)
        token = draws.categorical(RowLaws(at_node(probs, walk.node)), walk.is_open)
        next_token = torch.where(walk.is_open, token, next_token)
    return walk.verified(next_token, draws.used)


def speculative_sampling(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    draft: DraftLaws,
    uniforms: Uniforms,
) -> Verified:
    """Verify chains whose tokens were each drawn from q: accept x with probability min(1, p_x / q_x).

    Reference:
        Leviathan et al., arXiv 2211.17192, Algorithm 1; see `monge.verify.speculative_sampling`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes; negative for nodes that a shorter chain does not have.
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
    uniforms: Uniforms,
    *,
    num_fixed: Sequence[int] = (),
    replacement: bool = True,
) -> Verified:
    """Verify trees level by level: try siblings in drawing order against what is left of p.

    Reference:
        SpecInfer (Miao et al., arXiv 2305.09781, Algorithm 2), and without replacement RSD (Jeon et
        al., arXiv 2402.14160); see `monge.verify.recursive_rejection` and `recursive_rejection_without_replacement`.

    Args:
        probs: p after every node.
        token_ids: Tokens of the nodes, siblings in drawing order.
        children: Children of each node.
        draft: q of every node.
        uniforms: At least the number of candidates plus 1 for each request.
        num_fixed: Number of deterministic candidates of each node, such as its most probable
            tokens. They come first, and q gives them no mass. Empty for none.
        replacement: Whether siblings are independent draws. Otherwise each was drawn from q without
            the tokens of its elder siblings.
    """
    draws, walk = batch_draws(uniforms, 1 + sum(map(len, children))), BatchWalk(children, token_ids)
    ways = Ways.of(frozen(children), tuple(num_fixed), token_ids.device)
    everywhere, law = walk.is_open, RowLaws(at_node(probs, walk.node))
    for _ in range(walk.depth):
        q, candidates = RowLaws(*draft_at(draft, walk.node)), walk.candidates().unbind(1)
        is_fixed = (ways.fixed[walk.node] >= 0).unbind(1)
        token, left = rejection(
            law, q, candidates, is_fixed, draws, is_open=walk.is_open, replacement=replacement
        )
        law = pick(walk.is_open, left, law)
        walk.follow(token)
        law = pick(walk.is_open, RowLaws(at_node(probs, walk.node)), law)
    return walk.verified(draws.categorical(law, everywhere), draws.used)


def block(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    draft: DraftLaws,
    uniforms: Uniforms,
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
    chain, draws = _RowChain(probs, token_ids, draft), batch_draws(uniforms, probs.shape[1])
    accepted, next_token = whole_chain(chain, draws)
    levels = torch.arange(1, chain.depth + 1, device=token_ids.device)
    return Verified(
        path=torch.where(levels <= accepted[:, None], levels, -1),
        num_accepted=accepted,
        next_token=next_token,
        num_uniforms=draws.used,
    )


class _RowChain:
    """The chains of a batch; see `block`. Masses are read for all nodes at once; only the scales depend on earlier nodes."""

    def __init__(
        self,
        probs: Float64[Tensor, "batch nodes vocab"],
        token_ids: Int64[Tensor, "batch nodes"],
        draft: DraftLaws,
    ) -> None:
        self.depth, self.whole = probs.shape[1] - 1, torch.ones_like(probs[:, 0, 0])
        self.is_open = self.whole > 0.0
        self._probs, self._draft = probs, draft
        self._lengths = (token_ids[:, 1:] >= 0).sum(1)
        x, ids = token_ids[:, 1:, None].clamp_min(0), draft.token_ids
        p, q = probs[:, : self.depth], draft.probs[:, : self.depth]
        drafted = (
            q.gather(2, x).squeeze(2)
            if ids is None
            else torch.where(ids[:, : self.depth] == x, q, 0.0).sum(2)
        )
        self._ratios = (p.gather(2, x).squeeze(2) / drafted).unbind(1)

    def ratio(self, place: int) -> Float64[Tensor, " batch"]:
        return self._ratios[place]

    def weighed(
        self, scales: Sequence[Float64[Tensor, " batch"]]
    ) -> Callable[[int], Float64[Tensor, " batch"]]:
        scale = torch.stack(list(scales), 1)
        mass = torch.cat([self._masses(scale[:, : self.depth]), scale[:, self.depth :]], 1)
        levels = torch.arange(self.depth + 1, device=scale.device)
        shares = torch.where(levels == self._lengths[:, None], scale, share(mass, scale))
        return shares.unbind(1).__getitem__

    def _masses(self, scale: Float64[Tensor, "batch depth"]) -> Float64[Tensor, "batch depth"]:
        """The masses of the excess at every node."""
        p, (q, ids) = self._probs[:, : self.depth], self._draft
        q = q[:, : self.depth]
        ids = None if ids is None else ids[:, : self.depth].flatten(0, 1)
        rows = RowLaws(p.flatten(0, 1)), RowLaws(q.flatten(0, 1), ids)
        return excess(scale.flatten(), *rows).mass.view(scale.shape)

    def has(self, count: int) -> Bool[Tensor, " batch"]:
        return self._lengths >= count

    def left(
        self, count: Int64[Tensor, " batch"], scales: Sequence[Float64[Tensor, " batch"]]
    ) -> RowLaws:
        p = RowLaws(at_node(self._probs, count))
        q = RowLaws(*draft_at(self._draft, count.clamp_max(max(self.depth - 1, 0))))
        scale = torch.stack(list(scales), 1).gather(1, count[:, None]).squeeze(1)
        return pick(count < self._lengths, excess(scale, p, q), p)


def traversal(
    probs: Float64[Tensor, "batch nodes vocab"],
    token_ids: Int64[Tensor, "batch nodes"],
    children: Children,
    draft: DraftLaws,
    uniforms: Uniforms,
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
    tensors = TreeTensors.of(frozen(children), token_ids.device)
    fixed = checked_fixed(frozen(children), tuple(num_fixed))
    draws = batch_draws(uniforms, 1 + sum(map(len, children)))
    accepted, next_token = leaves_first(_RowTree(probs, token_ids, children, draft, fixed), draws)
    return Verified(
        path=tensors.paths[accepted],
        num_accepted=tensors.depths[accepted],
        next_token=next_token,
        num_uniforms=draws.used,
    )


class _RowTree:
    """The trees of a batch; see `traversal`."""

    def __init__(
        self,
        probs: Float64[Tensor, "batch nodes vocab"],
        token_ids: Int64[Tensor, "batch nodes"],
        children: Children,
        draft: DraftLaws,
        fixed: Sequence[int],
    ) -> None:
        self.whole = torch.ones_like(probs[:, 0, 0])
        self.is_open = self.whole > 0.0
        self._probs, self._tokens, self._children = probs, token_ids, children
        self._draft, self._fixed = draft, fixed

    def size(self, node: int) -> int:
        return subtree_size(self._children, node)

    def target(self, node: int) -> RowLaws:
        return RowLaws(self._probs[:, node])

    def offers(self, node: int) -> Iterable[tuple[int, tuple[Tensor, RowLaws]]]:
        children = tuple(dict.fromkeys(self._children[node]))
        tokens = [self._tokens[:, child] for child in children]
        laws = offers(
            self.target(node), RowLaws(*draft_of(self._draft, node)), tokens, self._fixed[node]
        )
        return zip(children, laws, strict=True)
