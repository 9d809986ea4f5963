"""List-level coupling: target and drafter run the same race of clocks, and the text depends on the seed alone."""

from dataclasses import dataclass

import torch

from monge.core.setting_types import check_bounds
from monge.core.verdict import Verdict
from monge.laws.clocks import clock_draws, first_token, num_clocks
from monge.laws.draws import ClockDraws, Draws
from monge.laws.law import Law, LawSequence
from monge.laws.proposal import Proposal
from monge.laws.tree import TokenTree
from monge.verify.base import Descent, Verifier
from monge.verify.problem import ScoredTree
from monge.verify.sample_and_match import SampleAndMatch


@dataclass(frozen=True, slots=True)
class Gumbel(Verifier):
    """Every token is the winner of a race between clocks that belong to its place in the text.

    Law:
        The text has the target's law, for candidates of any origin: no token depends on the
        candidates. It is a function of the seed, the prompt and the target: the same text for every
        drafter, tree and controller, and without speculation.

    Rule:
        With clocks S_i^k, exponential and independent, K = `num_drafts` of them for every token and
        place: `y = argmin_i (min over k < K of S_i^k) / p_i`. Descend while y is a candidate. The
        children `shared` are `x_k = argmin_i S_i^k / q_i` in the same clocks, so that target and
        draft agree where one token leads both races: with K such candidates draft k hits with
        probability `sum_j 1 / (sum_i max(q_i / q_j, p_i / p_j) + (K - 1) / p_j)` each, and with one
        candidate at least `(1 - TV) / (1 + TV)`. Other candidates are accepted as sample and match
        accepts them.

    Cost:
        K random numbers for every token of the support of p a node, and O(vocab) for the race; as
        many for each shared child.

    Args:
        num_drafts: K, best the width of the `shared` children: further clocks are drawn and never
            compared. Another K is another text.

    Raises:
        OptionError: If K is below 1.

    Reference:
        Daliri et al., arXiv 2408.07978 (K = 1, drafter invariance); Rowan et al., arXiv 2506.05632
        (lists of drafts).
    """

    num_drafts: int = 1

    accepts = frozenset[type[Proposal]](SampleAndMatch.accepts)
    invariant_for = accepts
    is_enumerable = False

    def __post_init__(self) -> None:
        check_bounds("gumbel", num_drafts=self.num_drafts)

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        walk = Descent(ScoredTree(tree=tree, target_laws=target_laws, draws=draws))
        source = clock_draws(draws)
        while walk.follow(self._winner(target_laws[walk.node], source, walk.depth)):
            pass
        return walk.verdict()

    def _winner(self, p: Law, source: ClockDraws, depth: int) -> int:
        size = num_clocks(p)
        clocks = torch.stack(
            [source.clocks(depth, draft, size) for draft in range(self.num_drafts)]
        )
        return first_token(clocks.min(dim=0).values, p)
