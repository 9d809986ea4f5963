"""Shared by rules that look at whole paths: the law of each candidate, and the part of a tree that a rule decides."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from monge.core.errors import ProposalMismatchError
from monge.core.verdict import Verdict
from monge.laws.law import Law, LawSequence
from monge.laws.proposal import Arbitrary, Deterministic, Proposal
from monge.laws.tree import TokenTree
from monge.verify.base import Descent, Rule, check_laws, why_no_exactness
from monge.verify.functional.where import offers
from monge.verify.problem import ScoredTree


def offered(proposal: Proposal, tokens: Sequence[int], p: Law) -> Iterator[tuple[int, Law]]:
    """Yield the distinct candidates of a node with their laws; see `where.offers`."""
    if (q := proposal.draft_law) is None:
        return offers(p, p, tokens, len(tokens))
    return offers(p, q, tuple(dict.fromkeys(tokens)), len(proposal.fixed_ids))


def decided_part(
    rule: Rule,
    tree: TokenTree,
    target_laws: LawSequence,
    walked: tuple[type[Proposal], ...] = (Arbitrary,),
) -> TokenTree:
    """Return the part of a tree that a rule decides; nodes left to sample and match become leaves.

    Nodes keep their numbers; nodes below such a leaf stay, and are no candidates. The part does not
    depend on what is below it, since choosing between a rule and sample and match by a drawn token
    would bias the text.

    Args:
        rule: The rule.
        tree: The whole tree.
        target_laws: A law per node.
        walked: Kinds of proposals that are left to sample and match; see `walk_on`.

    Raises:
        ProposalMismatchError: If the numbers of laws and nodes differ, or the rule is not exact for
            this tree.
    """
    check_laws(tree, target_laws)
    cut, is_drawn = set[int](), False
    for node, candidates in enumerate(tree.candidates):
        if candidates:
            proposal = tree.proposals[node]
            reason = why_no_exactness(rule, (type(proposal),), len(candidates))
            if reason is not None:
                raise ProposalMismatchError(f"node {node}: {reason}")
            is_drawn = is_drawn or not isinstance(proposal, (Arbitrary, Deterministic))
            if isinstance(proposal, walked):
                cut.add(node)
    if not is_drawn and tree.candidates[0]:
        cut.add(0)  # nothing is drawn, so sample and match is optimal
    if not cut:
        return tree
    return replace(
        tree,
        proposals=tuple(
            Deterministic() if node in cut else proposal
            for node, proposal in enumerate(tree.proposals)
        ),
        candidates=tuple(
            () if node in cut else candidates for node, candidates in enumerate(tree.candidates)
        ),
    )


def walk_on(scored: ScoredTree, verdict: Verdict) -> Verdict:
    """Continue a verdict with sample and match, if it ends at a leaf of its part that has candidates in the whole tree.

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
