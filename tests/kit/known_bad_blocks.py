"""Wrong decisions on whole chains, and one that only wastes tokens."""

from dataclasses import dataclass, replace

from monge.core.draws import Draws
from monge.core.law import LawSequence, residual
from monge.core.proposal import Iid
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import Verifier
from monge.verify.block import Block


@dataclass(frozen=True, slots=True)
class TokenLevelResidual(Verifier):
    """Block acceptance with the residual of the token-level rule.

    The first version of an engine's block verification.
    """

    accepts = Block.accepts
    max_width = 1

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        verdict = Block().verify(tree, target_laws, draws)
        node = verdict.num_accepted
        proposal = tree.proposals[node]
        if verdict.next_kind == "bonus" or not isinstance(proposal, Iid):
            return verdict
        return replace(
            verdict, next_token=draws.categorical(residual(target_laws[node], proposal.law))
        )


@dataclass(frozen=True, slots=True)
class BonusLeftOut(Verifier):
    """No token after a wholly accepted chain, whose last token stands in for it.

    Exact, and a token shorter.
    """

    accepts = Block.accepts
    max_width = 1

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        verdict = Block().verify(tree, target_laws, draws)
        if verdict.next_kind != "bonus" or not verdict.path:
            return verdict
        *path, last = verdict.path
        return replace(verdict, path=tuple(path), next_token=tree.token_ids[last])
