"""Block verification: decides the accepted prefix of a chain from its end."""

from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import Law, LawSequence
from monge.core.proposal import Deterministic, Iid, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import ScoredTree, Verifier
from monge.verify.whole_tree import Excess, decided_part, drawn_from, excess, share, walk_on


@dataclass(frozen=True, slots=True)
class Block(Verifier):
    """Decide on the whole drafted block: a probable token can compensate an improbable earlier one.

    Law:
        The accepted prefix, the token after it, and the target's own continuation together follow
        the target's law, for a chain whose tokens were each drawn from the declared law (`Iid`,
        width 1) or are a function of the path (`Deterministic`, one candidate). From a candidate of
        `Arbitrary` origin on, the target walk decides.

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
        Block Verification (Sun et al., arXiv 2403.10444), Algorithm 2 and Theorem 3: no rule for
        one path that leaves later rounds alone accepts more on average, `sum over d and x of min
        over k of q(x_1..x_k) p(x_(k+1)..x_d | x_1..x_k)`. The capped rule of Hierarchical
        Speculative Decoding (arXiv 2601.05724) is this one in other letters.
    """

    accepts = frozenset[type[Proposal]]({Iid, Deterministic})
    max_width = 1

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        scored = ScoredTree(tree=tree, target_laws=target_laws, draws=draws)
        return walk_on(scored, _decided(decided_part(self, tree, target_laws), target_laws, draws))


def _decided(tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
    last = next(node for node, candidates in enumerate(tree.candidates) if not candidates)
    scales, leftovers = _weigh(tree, target_laws, last)
    accepted = len(scales) - 1  # a token with a = 0 is not accepted, nor is any after it
    while accepted > 0:
        is_end = accepted == last
        prob = scales[accepted] if is_end else share(leftovers[accepted].mass, scales[accepted])
        if draws.bernoulli(prob):
            break
        accepted -= 1
    law: Law = target_laws[last] if accepted == last else leftovers[accepted].law
    return Verdict(
        path=tuple(range(1, accepted + 1)),
        next_token=draws.categorical(law),
        next_kind="bonus" if accepted == last else "correction",
        examined=(1,) * min(accepted + 1, last),
    )


def _weigh(
    tree: TokenTree, target_laws: LawSequence, last: int
) -> tuple[list[float], list[Excess]]:
    """Every a_i from the root to the last positive one, and the excess there (the end of the chain has none)."""
    scales, leftovers = [1.0], list[Excess]()
    for node in range(last):  # nodes of a chain are numbered from the root down
        p = target_laws[node]
        ((token, q),) = drawn_from(tree.proposals[node], (tree.token_ids[node + 1],), p.device)
        leftovers.append(excess(scales[-1], p, q))
        scale = min(1.0, scales[-1] * p.prob(token) / q.prob(token))
        if scale == 0.0:
            break
        scales.append(scale)
    return scales, leftovers
