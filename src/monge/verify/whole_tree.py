"""Shared by rules that look at whole paths: the law of each candidate, and the excess of a scaled target over it.

p = target law, q = draft law.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from monge.core.errors import ProposalMismatchError
from monge.core.law import DenseLaw, Law, LawSequence, one_hot, trusted_law
from monge.core.proposal import Arbitrary, Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import Descent, Rule, check_laws, unsupported_reason
from monge.verify.flow import below
from monge.verify.problem import ScoredTree


@dataclass(frozen=True, slots=True)
class Excess:
    """The excess of `scale * p` over q, and its mass `|(scale p - q)_+|`."""

    mass: float
    scale: float
    p: Law
    q: Law

    @property
    def law(self) -> Law:
        """The normalised excess, made on demand; p if there is no mass."""
        if isinstance(self.p, DenseLaw) and isinstance(self.q, DenseLaw):
            left = _difference(self.scale, self.p, self.q)
            total = left.sum()
            return trusted_law(left.div_(total)) if float(total) > 0.0 else self.p
        part = self.q.sparse()
        return below(self.p, part.token_ids, part.probs, self.scale)


def excess(scale: float, p: Law, q: Law) -> Excess:
    """Return `(scale * p - q)_+`: its mass, and its law on demand."""
    if isinstance(p, DenseLaw) and isinstance(q, DenseLaw):
        mass = float(_difference(scale, p, q).sum())
    elif isinstance(p, DenseLaw):
        part = q.sparse()  # of a few tokens: what they take of p is missing from its mass
        mass = max(0.0, scale - float((scale * p.at(part.token_ids)).minimum(part.probs).sum()))
    else:
        part = p.sparse()
        mass = float((scale * part.probs - q.at(part.token_ids)).clamp_min(0.0).sum())
    return Excess(mass, scale, p, q)


def _difference(scale: float, p: DenseLaw, q: DenseLaw) -> Float64[Tensor, " vocab"]:
    return (p.probs - q.probs if scale == 1.0 else scale * p.probs - q.probs).clamp_min_(0.0)


def share(mass: float, scale: float) -> float:
    """Return `S / (S + 1 - a)`: the node's own share of the mass that its candidates leave undecided.

    Both vanish only if a = 1 and p = q; a deeper token is then certain to be accepted, and the
    result is never used.
    """
    undecided = mass + (1.0 - scale)
    return mass / undecided if undecided > 0.0 else 0.0


def drawn_from(
    proposal: Proposal, tokens: tuple[int, ...], device: torch.device
) -> Iterator[tuple[int, Law]]:
    """Every distinct candidate in drawing order, with its law given the ones before it.

    A deterministic candidate has a point mass. Independent draws, repeats dropped, are draws
    without replacement whose number does not depend on which tokens are still to come.
    """
    if not isinstance(proposal, Iid | WithoutReplacement | Mixed):
        yield from ((token, one_hot(token, device)) for token in tokens)
        return
    num_fixed = len(proposal.fixed) if isinstance(proposal, Mixed) else 0
    yield from ((token, one_hot(token, device)) for token in tokens[:num_fixed])
    distinct = tuple(dict.fromkeys(tokens[num_fixed:]))
    q = proposal.law
    for position, token in enumerate(distinct):
        yield token, q
        if position + 1 < len(distinct):
            rest = q.without(token)
            assert rest is not None, "more candidates than the draft law has tokens"
            q = rest


def decided_part(
    rule: Rule,
    tree: TokenTree,
    target_laws: LawSequence,
    walked: tuple[type[Proposal], ...] = (Arbitrary,),
) -> TokenTree:
    """Return the part of a tree that a rule decides; nodes left to the target walk become leaves.

    Nodes keep their numbers; nodes below such a leaf stay, and are no candidates. The part does not
    depend on what is below it, since choosing between a rule and the target walk by a drawn token
    would bias the text.

    Args:
        rule: The rule.
        tree: The whole tree.
        target_laws: One law a node.
        walked: Kinds of proposals that are left to the target walk; see `walk_on`.

    Raises:
        ProposalMismatchError: If there is not one law a node, or the rule is not exact for this
            tree.
    """
    check_laws(tree, target_laws)
    cut, is_drawn = set[int](), False
    for node, candidates in enumerate(tree.candidates):
        if candidates:
            proposal = tree.proposals[node]
            reason = unsupported_reason(rule, (type(proposal),), len(candidates))
            if reason is not None:
                raise ProposalMismatchError(f"node {node}: {reason}")
            is_drawn = is_drawn or not isinstance(proposal, (Arbitrary, Deterministic))
            if isinstance(proposal, walked):
                cut.add(node)
    if not is_drawn and tree.candidates[0]:
        cut.add(0)  # nothing is drawn, so the target walk is optimal
    if not cut:
        return tree
    return replace(
        tree,
        proposals=tuple(
            Deterministic() if node in cut else one for node, one in enumerate(tree.proposals)
        ),
        candidates=tuple(() if node in cut else one for node, one in enumerate(tree.candidates)),
    )


def walk_on(scored: ScoredTree, verdict: Verdict) -> Verdict:
    """Continue a verdict with the target walk, if it ends at a leaf of its part that has candidates in the whole tree.

    The token after a leaf is a draw from the target's law; if it is a candidate, the walk goes on.
    """
    end = verdict.path[-1] if verdict.path else 0
    if verdict.next_kind == "correction" or not scored.tree.candidates[end]:
        return verdict
    descent = Descent(scored, path=verdict.path, examined=verdict.examined)
    descent.follow(verdict.next_token)
    while descent.is_open:
        descent.follow(scored.draws.categorical(descent.problem().target_law))
    return descent.verdict()
