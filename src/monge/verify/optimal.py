"""The optimal coupling of one node: every draw gets a score, the smallest one below a threshold is accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.errors import unknown_name
from monge.core.law import Law
from monge.core.lazy_laws import below
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal
from monge.transport.rearrangement import Rearrangement
from monge.transport.rearrangement_law import ScoreTable
from monge.verify.fast.optimal import chances, decide
from monge.verify.fast.scores import SMALLEST_MASS
from monge.verify.flow import Flow, FlowRule, total_of, walked, with_fixed
from monge.verify.functional.optimum import optimal
from monge.verify.problem import NodeProblem
from monge.verify.programs import Programs, walk
from monge.verify.rrs import emitted

GIVEN: Final = ("positions", "candidates")
"""Arguments of the decision: positions that are drawn for the draws, or the draws alone."""


_PROGRAMS: Final = Programs(
    by_kind={Iid: optimal, Mixed: optimal, Deterministic: walk}, takes_fixed_nodes=True
)


@dataclass(frozen=True, slots=True)
class Optimal(FlowRule):
    """The optimal rule for independent draws, with or without deterministic candidates beside them.

    Law:
        The emitted token follows p for K independent draws from q (`Iid`), for deterministic
        candidates D followed by K independent draws from a law that gives them no mass (`Mixed`),
        and for deterministic candidates alone.

    Rule:
        `alpha = min over sets H of [p(H) + 1 - q(H)^K]`, H outside D; `v0 = 1 - (1 - alpha)^(1/K)`;
        `a = min(p, mu q)` with mu such that a sums to alpha. The support of q lies on [0, 1] by
        decreasing p / q. Each draw takes a uniform position u in the window of its token, and its
        score is u or the swap partner of u (see `transport/rearrangement.py`), so that scores are
        uniform and token y, if its score is the smallest of K, is below v0 with mass a(y) in all.
        Accept the draw with the smallest score if that is below v0; otherwise emit y proportional
        to `p - a`, over the whole vocabulary, D included. Acceptance is p(D) + alpha, the optimum.

    Cost:
        O(s log s) for the line and O(K s) for the partners of K draws, s = support of q; O(vocab)
        when no draw is accepted. Two uniforms a draw: not enumerable, proved by exact integration
        instead. Given the candidates alone, positions and swaps are integrated out: a quadrature of
        20 nodes for each piece of the line, for proofs and measurements.

    Reference:
        Own construction, novelty not established. The optimum: Hu et al., arXiv 2502.18779; for K =
        2 Khisti et al., arXiv 2410.18234.

    Args:
        given: `positions` draws them; `candidates` decides by exact probabilities, slowly, and can
            be enumerated.
    """

    given: str = "positions"

    accepts = frozenset[type[Proposal]]({Iid, Mixed, Deterministic})
    is_enumerable: bool = field(init=False, repr=False)
    programs: Programs | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.given not in GIVEN:
            raise unknown_name("what the optimal rule is given:", self.given, GIVEN)
        is_enumerable = self.given == "candidates"
        object.__setattr__(self, "is_enumerable", is_enumerable)
        object.__setattr__(self, "programs", None if is_enumerable else _PROGRAMS)

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        p = target_law
        if not isinstance(proposal, Iid | Mixed):
            return draws.categorical(p)  # no draw to couple with: the target walk is optimal
        drawn = candidates[len(proposal.fixed) :] if isinstance(proposal, Mixed) else candidates
        if len(drawn) == 1:  # the maximal coupling is optimal, with nothing to lay on a line
            return emitted(p, Iid(proposal.law), drawn, draws)
        if self.given == "positions":
            return decide(p, proposal.law, drawn, draws)
        node = DraftLine.of_node(p, 1.0, proposal.law, len(drawn))
        token = node.enumerated_winner(drawn, draws)
        return draws.categorical(below(p, node.tokens, node.accepted)) if token is None else token

    def flow(self, problem: NodeProblem) -> Flow:
        """As emitted, given the positions or the candidates; the residual delivers deterministic candidates."""
        if not isinstance(problem.proposal, Iid | Mixed):
            return walked(problem)
        flow = chances(problem) if self.given == "positions" else _enumerated(problem)
        return _completed(problem, flow)


def _enumerated(problem: NodeProblem) -> Flow:
    """The flow to the draws, given the draws alone."""
    node = DraftLine.of_node(
        problem.target_law, problem.scale, problem.draft_law, len(problem.drawn)
    )
    return Flow(
        accept_probs=node.accept_probs(problem.drawn), token_ids=node.tokens, masses=node.accepted
    )


def _completed(problem: NodeProblem, flow: Flow) -> Flow:
    """The flow with what the residual delivers to the deterministic candidates."""
    if not problem.fixed:
        return flow
    rejected = max(0.0, 1.0 - total_of(flow.accept_probs.values()))
    refused = 1.0 - total_of(flow.masses)
    probs = dict(flow.accept_probs)
    for token in problem.fixed:
        due = problem.scale * problem.target_law.prob(token)
        probs[token] = rejected * min(1.0, due / refused) if refused > 0.0 else 0.0
    token_ids, masses = with_fixed(problem, flow.token_ids, flow.masses)
    return Flow(accept_probs=probs, token_ids=token_ids, masses=masses)


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
