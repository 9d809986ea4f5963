"""Traversal verification: a tree is decided from its leaves to its root."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from monge.core.verdict import Verdict
from monge.laws.draws import Draws
from monge.laws.law import Law, LawSequence
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.laws.tree import TokenTree
from monge.verify.base import Verifier
from monge.verify.functional.rejection import leaves_first, subtree_size, traversal
from monge.verify.functional.where import HostDraws
from monge.verify.problem import ScoredTree, verdict_at
from monge.verify.programs import Programs, walk
from monge.verify.whole_tree import decided_part, offered, walk_on


@dataclass(frozen=True, slots=True)
class Traversal(Verifier):
    """Visit the tree leaf by leaf in drawing order.

    A node is decided after everything below it has been rejected.

    Law:
        The accepted path, the token after it, and the target's own continuation together follow the
        target's law, for candidates drawn without replacement *in drawing order* and for
        independent draws (repeats dropped). The same holds for deterministic candidates, alone or
        followed by independent draws. Whether a node has candidates may depend on anything known
        before they are drawn. Below a node with candidates of `Arbitrary` origin sample and match
        decides.

    Rule:
        To visit a node with weight a: `P = p`, `Q = q`; for each child c in drawing order, visit it
        with weight `min(1, a P_c / Q_c)` and stop if anything there is accepted; else `R = (a P -
        Q)_+`, `a = |R| / (|R| + 1 - a)`, `P = R / |R|`, and Q without c, renormalised. After its
        children accept the node with probability a, and emit `y ~ P`. The root has weight 1 and is
        accepted in the end: its last P is drawn from. A child sees a, P and Q as the rejection of
        its elder siblings has left them.

    Cost:
        O(support of p) for each child that is rejected; all nodes are visited in the worst case.

    Reference:
        Traversal Verification (arXiv 2505.12398). For one child per node it is Block Verification
        (Sun et al., arXiv 2403.10444), and optimal; for more it is lossless, not optimal.
    """

    accepts = frozenset[type[Proposal]]({WithoutReplacement, Iid, Mixed, Deterministic})
    programs = Programs(
        by_kind={
            WithoutReplacement: traversal,
            Iid: traversal,
            Mixed: traversal,
            Deterministic: walk,
        },
        takes_fixed_nodes=True,
    )

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        part = decided_part(self, tree, target_laws)
        node, token = leaves_first(_TreeOfRequest(part, target_laws), HostDraws(draws))
        scored = ScoredTree(tree=tree, target_laws=target_laws, draws=draws)
        return walk_on(scored, verdict_at(part, node, token))


class _TreeOfRequest:
    """The tree of a request; see `functional.rejection.TreeProblem`."""

    whole, is_open = 1.0, np.True_

    def __init__(self, tree: TokenTree, target_laws: LawSequence) -> None:
        self._tree, self._laws = tree, target_laws

    def size(self, node: int) -> int:
        return subtree_size(self._tree.candidates, node)

    def target(self, node: int) -> Law:
        return self._laws[node]

    def offers(self, node: int) -> Iterator[tuple[int, tuple[int, Law]]]:
        children = self._tree.candidates[node]
        tokens = tuple(self._tree.token_ids[child] for child in children)
        offers = offered(self._tree.proposals[node], tokens, self._laws[node])
        return zip(dict.fromkeys(children), offers, strict=True)
