"""Multi-path block verification: the best of several independent paths, decided as one block."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from monge.core.verdict import Verdict
from monge.laws.draws import Draws
from monge.laws.law import Law, LawSequence, SparseLaw, sparse_part
from monge.laws.proposal import Arbitrary, Deterministic, Iid, PathDraws, Proposal
from monge.laws.tree import TokenTree, chain_of
from monge.verify.base import Verifier
from monge.verify.block import Block
from monge.verify.problem import ScoredTree
from monge.verify.whole_tree import decided_part, walk_on


@dataclass(frozen=True, slots=True)
class MultipathBlock(Verifier):
    """Select the path whose tokens have the largest p / q, first token first.

    The path is then verified as a block, with its own law.

    Law:
        The accepted prefix, the token after it, and the target's own continuation together follow
        the target's law, for K independent paths (`PathDraws`) and for trees whose nodes draw
        independently (`Iid`). Below a node with other candidates sample and match decides.

    Rule:
        At every node order tokens by increasing (p / q, id) and follow the largest candidate. With
        C_x the mass of q up to and with x in that order and C_x- without x, the path selected in
        this way from K independent paths has the law `r(x | u) = [(l + Q C_x)^K - (l + Q C_x-)^K] /
        [(l + Q)^K - l^K]`; at the root l = 0 and Q = 1, and below x `l' = l + Q C_x-`, `Q' = Q
        q_x`. Where the number of draws was fixed for the node itself (`Iid`), K is that number and
        l = 0, Q = 1 start anew. Block verification on the path, with r in place of q.

    Cost:
        O(s log s) for each node of the selected path, s = support of q, and then as `block`; the
        other paths cost nothing.

    Reference:
        Greedy multi-path block verification, Thomas and Pal, arXiv 2602.16961. Differences of
        powers are taken as `a^K - b^K = (a - b) (a^(K-1) + ... + b^(K-1))`, which loses no digits;
        l and Q are kept relative to their sum. Starting anew is our own extension; for one path it
        is `block`.
    """

    accepts = frozenset[type[Proposal]]({Iid, Deterministic})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        part = decided_part(self, tree, target_laws, walked=(Arbitrary, Deterministic))
        path, laws = _select(part, target_laws)
        root, *tokens = (tree.token_ids[node] for node in path)
        chain = chain_of(root, tuple(tokens), tuple(map(Iid, laws)))
        verdict = Block().verify(chain, _Along(target_laws, path), draws)
        decided = replace(
            verdict,
            path=tuple(path[node] for node in verdict.path),
            examined=tuple(
                len(set(tree.candidates[node])) for node in path[: len(verdict.examined)]
            ),
        )
        return walk_on(ScoredTree(tree=tree, target_laws=target_laws, draws=draws), decided)


def _select(tree: TokenTree, target_laws: LawSequence) -> tuple[list[int], list[SparseLaw]]:
    """Return the selected path from the root down, and r after every node of it but the last.

    It ends at a token that the target cannot emit: none is accepted from there on, and the target
    has no law below it.
    """
    path, laws = [0], list[SparseLaw]()
    count, below, within, can_go_on = 0, 0.0, 1.0, True
    follows_paths = False
    while (candidates := tree.candidates[path[-1]]) and can_go_on:
        proposal = tree.proposals[path[-1]]
        assert isinstance(proposal, Iid)
        if not (follows_paths and isinstance(proposal, PathDraws)):
            count, below, within = proposal.width, 0.0, 1.0
        follows_paths = isinstance(proposal, PathDraws)
        p = target_laws[path[-1]]
        node = _Order.of(p, proposal.law)
        child = max(candidates, key=lambda child, node=node: node.rank(tree.token_ids[child]))
        laws.append(node.largest(count, below, within))
        place = node.rank(tree.token_ids[child])
        lower, share = float(node.lower[place]), float(node.masses[place])
        below, within = below + within * lower, within * share
        below, within = below / (below + within), within / (below + within)
        can_go_on = p.prob(tree.token_ids[child]) > 0.0
        path.append(child)
    return path, laws


@dataclass(frozen=True, slots=True)
class _Along:
    """The laws along a path, computed when they are read."""

    laws: LawSequence
    path: Sequence[int]

    def __len__(self) -> int:
        return len(self.path)

    def __getitem__(self, node: int) -> Law:
        return self.laws[self.path[node]]


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """q by increasing (p / q, id).

    Args:
        token_ids: The support of q, increasing.
        order: Index in it of each token of the order.
        masses: q of every token.
        lower: q of all tokens before it.
        upper: The same with the token itself.
    """

    token_ids: torch.Tensor
    order: torch.Tensor
    masses: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor

    @classmethod
    def of(cls, p: Law, q: Law) -> "_Order":
        part = q.sparse()
        order = (p.at(part.token_ids) / part.probs).argsort(stable=True)  # ids increase already
        masses = part.probs[order]
        upper = masses.cumsum(0)
        return cls(
            part.token_ids, order, masses, torch.cat([upper.new_zeros(1), upper[:-1]]), upper
        )

    def rank(self, token: int) -> int:
        return int((self.order == torch.searchsorted(self.token_ids, token)).nonzero())

    def largest(self, count: int, below: float, within: float) -> SparseLaw:
        """Law r of the next token of the largest of `count` paths; `below` and `within` are l and Q, l + Q = 1."""
        low, high = below + within * self.lower, below + within * self.upper
        sums = torch.zeros_like(low)
        total = 0.0
        for power in range(count):
            sums = sums + high**power * low ** (count - 1 - power)
            total += below ** (count - 1 - power)
        probs = self.masses * sums / total
        by_id = torch.empty_like(probs).scatter_(0, self.order, probs)
        if float(by_id.min()) > 0.0:
            return sparse_part(self.token_ids, by_id)
        (kept,) = (by_id > 0.0).nonzero(as_tuple=True)
        return sparse_part(self.token_ids[kept], by_id[kept])
