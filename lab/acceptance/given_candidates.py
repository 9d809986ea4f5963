"""The optimal rule given the candidates alone: positions and swaps are integrated out, so it can be enumerated.

For proofs and measurements: a quadrature of 20 nodes for each piece of the line takes long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lab.acceptance.rearrangement import Rearrangement
from lab.acceptance.score_table import ScoreTable
from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.lazy_laws import below
from monge.laws.proposal import Proposal
from monge.verify.flow import Flow, walked
from monge.verify.functional.lines import SMALLEST_MASS
from monge.verify.optimal import Optimal, completed
from monge.verify.problem import NodeProblem
from monge.verify.recursive_rejection import emitted


@dataclass(frozen=True, slots=True)
class OptimalGivenCandidates(Optimal):
    """`optimal`, which decides by its exact probabilities given the candidates."""

    is_enumerable = True

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        p, q, drawn = target_law, proposal.draft_law, candidates[len(proposal.fixed_ids) :]
        if q is None or len(drawn) == 1:
            return emitted(p, q, drawn, draws)
        node = DraftLine.of_node(p, 1.0, q, len(drawn))
        token = node.enumerated_winner(drawn, draws)
        return draws.categorical(below(p, node.tokens, node.accepted)) if token is None else token

    def flow(self, problem: NodeProblem) -> Flow:
        if problem.proposal.draft_law is None:
            return walked(problem)
        node = DraftLine.of_node(
            problem.target_law, problem.scale, problem.draft_law, len(problem.drawn)
        )
        probs = node.accept_probs(problem.drawn)
        flow = Flow(accept_probs=probs, token_ids=node.tokens, masses=node.accepted)
        return completed(problem, flow)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLine:
    """The score map of one node given the candidates alone, on the drafted tokens with a place on the line."""

    tokens: Int64[Tensor, " support"]
    line: Rearrangement

    @classmethod
    def of_node(cls, p: Law, scale: float, q: Law, width: int) -> "DraftLine":
        part = q.sparse()
        tokens = part.token_ids[part.probs > SMALLEST_MASS]
        target, draft = (scale * p.at(tokens)).cpu().numpy(), q.at(tokens).cpu().numpy()
        return cls(tokens=tokens, line=_line(target.tobytes(), draft.tobytes(), width))

    @property
    def accepted(self) -> Float64[Tensor, " support"]:
        return torch.from_numpy(self.line.accepted_masses).to(self.tokens.device)

    def enumerated_winner(self, drawn: Sequence[int], draws: Draws) -> int | None:
        """The accepted draw, by its probability given the draws."""
        reach = 1.0
        for token, prob in self.accept_probs(drawn).items():
            if draws.bernoulli(1.0 if prob >= reach else prob / reach):
                return token
            reach -= prob
        return None

    def accept_probs(self, drawn: Sequence[int]) -> dict[int, float]:
        """Accept probability of every distinct draw given all of them."""
        # What a quadrature gives to a token without accepted mass is rounding; the target may have
        # no law after such a token.
        masses = self.line.accepted_masses
        index_of = {token: i for i, token in enumerate(self.tokens.tolist()) if masses[i] > 0.0}
        on_line = tuple(sorted(index_of[token] for token in drawn if token in index_of))
        probs = _table(self.line).accept_probs(on_line) if on_line else {}
        return {token: probs.get(index_of.get(token, -1), 0.0) for token in dict.fromkeys(drawn)}


# An enumeration asks about one node once for every tuple of its candidates.
@lru_cache(maxsize=32)
def _line(target: bytes, draft: bytes, width: int) -> Rearrangement:
    return Rearrangement.build(np.frombuffer(target), np.frombuffer(draft), width)


@lru_cache(maxsize=32)
def _table(line: Rearrangement) -> ScoreTable:
    return ScoreTable.build(line)
