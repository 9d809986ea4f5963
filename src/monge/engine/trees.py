"""The tree of a round as it was verified, for requests that keep it."""

from monge.core.errors import MongeError
from monge.core.law import Law
from monge.core.proposal import Independent, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict, VerifiedTree
from monge.engine.sampling import NodeLaws


def verified_tree(tree: TokenTree, laws: NodeLaws, verdict: Verdict) -> VerifiedTree:
    """Return a verified tree with the probabilities of its tokens; nothing is drawn for that."""
    nodes = range(1, tree.num_nodes)
    target = [_target_prob(laws, tree.parents[node], tree.token_ids[node]) for node in nodes]
    draft = [_draft_prob(tree, node) for node in nodes]
    last = verdict.path[-1] if verdict.path else 0
    return VerifiedTree(
        token_ids=tree.token_ids,
        parents=tree.parents,
        target_probs=(None, *target),
        draft_probs=(None, *draft),
        path=verdict.path,
        next_prob=_target_prob(laws, last, verdict.next_token),
    )


def _target_prob(laws: NodeLaws, node: int, token: int) -> float | None:
    try:
        return laws[node].prob(token)
    except MongeError:  # a processor, or logits, at a node that the verifier did not look at
        return None


def _draft_prob(tree: TokenTree, node: int) -> float | None:
    parent = tree.parents[node]
    law = _law_of(tree.proposals[parent], tree.candidates[parent].index(node))
    # A law has no mass for candidates beside it that were not drawn.
    return None if law is None else law.prob(tree.token_ids[node]) or None


def _law_of(proposal: Proposal, place: int) -> Law | None:
    """Return the law that a candidate was drawn from, if it was drawn."""
    if isinstance(proposal, Independent):
        return proposal.laws[place]
    return getattr(proposal, "law", None)
