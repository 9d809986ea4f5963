"""How the candidates of the nodes that were stood on split into top tokens and draws."""

from collections.abc import Sequence

from monge.core.proposal import Mixed, Proposal
from monge.core.tree import TokenTree


def splits_along(tree: TokenTree, path: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Candidates, and top tokens among them, of every node with candidates from the root down a path: `StepRecord.splits`."""
    return tuple(_split(tree.proposals[node]) for node in (0, *path) if tree.candidates[node])


def _split(proposal: Proposal) -> tuple[int, int]:
    # A law with no more tokens than are drawn from it leaves nothing to choose: all of them are
    # offered, whatever was planned.
    if (
        not isinstance(proposal, Mixed)
        or len(proposal.law.top(proposal.width + 1)) <= proposal.width
    ):
        return 0, 0
    return len(proposal.fixed) + proposal.width, len(proposal.fixed)
