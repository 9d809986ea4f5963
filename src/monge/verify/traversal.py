"""Traversal verification: a tree is decided from its leaves to its root."""

from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import Law, LawSequence
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import Verifier
from monge.verify.functional.rejection import traversal
from monge.verify.problem import ScoredTree, verdict_at
from monge.verify.programs import Programs, walk
from monge.verify.whole_tree import decided_part, drawn_from, excess, share, walk_on


@dataclass(frozen=True, slots=True)
class Traversal(Verifier):
    """Visit the tree leaf by leaf in drawing order.

    A node is decided after everything below it has been rejected.

    Law:
        The accepted path, the token after it, and the target's own continuation together follow the
        target's law, for candidates drawn without replacement *in drawing order*, for independent
        draws (repeats dropped), deterministic candidates, and deterministic ones followed by
        independent draws. Whether a node has candidates may depend on anything known before they
        are drawn. Below a node with candidates of `Arbitrary` origin the target walk decides.

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
        Traversal Verification (arXiv 2505.12398). For one child a node it is Block Verification
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
        found = _visit(part, target_laws, 0, 1.0, draws)
        assert found is not None, "the root is always accepted"
        node, law = found
        verdict = verdict_at(part, node, draws.categorical(law))
        return walk_on(ScoredTree(tree=tree, target_laws=target_laws, draws=draws), verdict)


def _visit(
    tree: TokenTree, target_laws: LawSequence, node: int, weight: float, draws: Draws
) -> tuple[int, Law] | None:
    """Return the accepted node at or below `node` with the law of the token after it, or `None`."""
    p = target_laws[node]
    candidates = tuple(tree.token_ids[child] for child in tree.candidates[node])
    child_of = dict(zip(candidates, tree.candidates[node], strict=True))
    for token, q in drawn_from(tree.proposals[node], candidates, p.device):
        child_weight = min(1.0, weight * p.prob(token) / q.prob(token))
        found = (
            _visit(tree, target_laws, child_of[token], child_weight, draws)
            if child_weight > 0.0
            else None
        )
        if found is not None:
            return found
        rest = excess(weight, p, q)
        weight = share(rest.mass, weight)
        p = rest.law
    return (node, p) if node == 0 or draws.bernoulli(weight) else None
