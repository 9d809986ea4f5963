"""Write an acceptance rule, and let enumeration say whether it is lossless."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.api import make_components
from monge.laws.draws import Draws
from monge.laws.law import Law, residual
from monge.laws.proposal import Iid, Proposal
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.verify.base import NodeRule

VOCAB = 3


@dataclass(frozen=True)
class Mine(NodeRule):
    """One independent candidate; the correction token comes from the residual, or (wrongly) from the target's law."""

    use_residual: bool
    accepts = frozenset({Iid})
    max_width = 1

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        (x,) = candidates
        p, q = target_law, proposal.law
        if draws.bernoulli(min(1.0, p.prob(x) / q.prob(x))):
            return x
        return draws.categorical(residual(p, q) if self.use_residual else p)


def make_models():
    return TabularModel(RandomTable(VOCAB, 1), VOCAB), TabularModel(RandomTable(VOCAB, 2), VOCAB)


case = Case(horizon=2, max_new_tokens=3)
truth = target_law(make_models()[0], case)
for rule in (Mine(use_residual=True), Mine(use_residual=False)):
    output = output_law(
        lambda rule=rule: make_components(*make_models(), tree="chain(2)", verifier=rule), case
    )
    print(f"use_residual={rule.use_residual}: law error {law_error(output, truth):.1e}")
