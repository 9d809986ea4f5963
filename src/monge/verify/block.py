"""Block verification: decides the accepted prefix of a chain from its end."""

from dataclasses import dataclass

from monge.core.verdict import Verdict
from monge.laws.draws import Draws
from monge.laws.law import LawSequence
from monge.laws.proposal import Deterministic, Iid, Proposal
from monge.laws.tree import TokenTree
from monge.verify.base import Verifier
from monge.verify.functional.on_host import HostChain
from monge.verify.functional.rejection import whole_chain
from monge.verify.functional.where import HostDraws
from monge.verify.problem import ScoredTree, verdict_at
from monge.verify.programs import Programs, on_chain, walk
from monge.verify.whole_tree import decided_part, offered, walk_on


@dataclass(frozen=True, slots=True)
class Block(Verifier):
    """Decide on the whole drafted block: a probable token can compensate an improbable earlier token.

    Law:
        The accepted prefix, the token after it, and the target's own continuation together follow
        the target's law, for a chain whose tokens were each drawn from the declared law (`Iid`,
        width 1) or are a function of the path (`Deterministic`, one candidate). From a candidate of
        `Arbitrary` origin on, sample and match decides.

    Rule:
        For a chain x_1 .. x_L: `a_0 = 1`, `a_i = min(1, a_(i-1) p(x_i | x_<i) / q(x_i | x_<i))`;
        with `S_i = |(a_i p(. | x_<=i) - q(. | x_<=i))_+|`, `h_i = S_i / (S_i + 1 - a_i)` for i < L,
        and `h_L = a_L`. From i = L down to 1 accept the first i tokens with probability h_i, and
        stop at the first success; none is accepted otherwise. With t tokens accepted emit `y ~ p`
        where t = L, else y proportional to `(a_t p - q)_+` after x_t. S_i + 1 - a_i vanishes only
        where a_i = 1 and p = q: acceptance further down is then certain, and h_i = 0.

    Cost:
        O(support of p) a position, for all positions; a residual is computed only where the round
        ends.

    Reference:
        Block Verification (Sun et al., arXiv 2403.10444), Algorithm 2 and Theorem 3: no rule for a
        single path that leaves later rounds alone accepts more on average, `sum over d and x of min
        over k of q(x_1..x_k) p(x_(k+1)..x_d | x_1..x_k)`. The capped rule of Hierarchical
        Speculative Decoding (arXiv 2601.05724) is the same rule in another notation.
    """

    accepts = frozenset[type[Proposal]]({Iid, Deterministic})
    max_width = 1
    programs = Programs(by_kind={Iid: on_chain, Deterministic: walk}, max_width=1)

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        part = decided_part(self, tree, target_laws)
        accepted, token = whole_chain(_chain_of(part, target_laws), HostDraws(draws))
        verdict = verdict_at(part, accepted, token)
        return walk_on(ScoredTree(tree=tree, target_laws=target_laws, draws=draws), verdict)


def _chain_of(tree: TokenTree, target_laws: LawSequence) -> HostChain:
    """Return the chain of a tree, whose nodes are numbered from the root down."""
    depth = next(node for node, children in enumerate(tree.candidates) if not children)
    tokens = tree.token_ids[1 : depth + 1]
    offers = (
        next(iter(offered(tree.proposals[place], (x,), target_laws[place])))
        for place, x in enumerate(tokens)
    )
    return HostChain(tokens, target_laws, (q for _, q in offers))
