"""Select one candidate, then accept it as if it were the only candidate."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.errors import OptionError
from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.lazy_laws import below
from monge.laws.proposal import Deterministic, Iid, Independent, Proposal
from monge.transport.canonical import MAX_LEADING, PairSelection, Tournament, tournament
from monge.verify.flow import Flow, FlowRule, walked
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True)
class Canonical(FlowRule):
    """Select between candidates by a truncated linear program, pair by pair.

    The winner is then accepted or refused by a single-draft step.

    Law:
        The emitted token follows p for independent draws from the same law (`Iid`) or from
        different laws (`Independent`), and for deterministic candidates, which are left to the
        sample and match.

    Rule:
        For X_1 ~ q_1 and X_2 ~ q_2, tokens by decreasing `p - q_1 q_2`: a pair of two of the first
        s tokens selects i with probability w_ij, a pair with one of them selects that token, any
        other pair the higher ranked token (`ranked`) or X_1 (`first`). w maximises `sum min(p, x)`,
        x the law of the selected token; x is *recomputed from w clipped to [0, 1]*. The winner, of
        law x, meets X_3 ~ q_3 in the same way, and so on. Accept the last winner z with probability
        `min(1, p_z / x_z)`; otherwise emit y proportional to `(p - x)_+`. Acceptance is `sum min(p,
        x)`: the optimum for two candidates where s covers the support, and at most the optimum for
        more.

    Cost:
        For each candidate after the first, a linear program with s (s + 1) / 2 variables (about a
        millisecond at s = 5), and a sort of the draft laws' supports. O(vocab) after a rejection.

    Reference:
        Khisti et al., arXiv 2410.18234, Theorem 1 and section 4 (p and q are swapped there). The
        tail `first` is our reading of the second variant, whose text was not available.

    Args:
        size: s, the number of leading tokens.
        tail: Selection of a pair outside the leading tokens: the higher `ranked` token, or the
            `first` candidate.
    """

    size: int = 5
    tail: str = "ranked"

    accepts = frozenset[type[Proposal]]({Iid, Independent, Deterministic})

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_LEADING:
            raise OptionError(f"canonical: size must lie in 1..{MAX_LEADING}; got {self.size}")
        if self.tail not in {"ranked", "first"}:
            raise OptionError(f"canonical: tail must be 'ranked' or 'first'; got {self.tail!r}")

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        p = target_law
        if not (laws := proposal.draft_laws):
            return draws.categorical(p)  # no draw to couple with: sample and match is optimal
        match = self._match(p, 1.0, laws)
        z, *others = (match.index(token) for token in candidates)
        for pair, challenger in zip(match.rounds, others, strict=True):
            if not draws.bernoulli(pair.first_prob(z, challenger)):
                z = challenger
        if draws.bernoulli(match.accept_prob(z)):
            return int(match.tokens[z])
        return draws.categorical(below(p, match.tokens, match.accepted))

    def flow(self, problem: NodeProblem) -> Flow:
        if not (laws := problem.proposal.draft_laws):
            return walked(problem)
        match = self._match(problem.target_law, problem.scale, laws)
        candidates = [match.index(token) for token in problem.candidates]
        accept = {
            int(match.tokens[z]): prob * match.accept_prob(z) if prob > 0.0 else 0.0
            for z, prob in Tournament(rounds=match.rounds).selection_probs(candidates).items()
        }
        return Flow(accept_probs=accept, token_ids=match.tokens, masses=match.accepted)

    def _match(self, p: Law, scale: float, laws: Sequence[Law]) -> "_Match":
        different = dict.fromkeys(laws)
        first, *others = (law.sparse().token_ids for law in different)
        is_shared = all(ids is first for ids in others)
        tokens = first if is_shared else torch.cat([first, *others]).unique()
        target = scale * p.at(tokens).cpu().numpy()
        # One more symbol, never drafted, carries what p has elsewhere and what the scale leaves
        # out.
        with_rest = np.append(target, max(0.0, 1.0 - target.sum()))
        masses = {law: np.append(law.at(tokens).cpu().numpy(), 0.0) for law in different}
        drafts = [masses[law] for law in laws]
        rounds: tuple[PairSelection, ...] = ()
        if len(drafts) > 1:
            tail = "first" if self.tail == "first" else "ranked"
            rounds = tournament(with_rest, drafts, num_leading=self.size, tail=tail).rounds
        winner_law = rounds[-1].winner_law if rounds else drafts[0]
        return _Match(tokens=tokens, target=target, rounds=rounds, winner_law=winner_law[:-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Match:
    """The selection at a node; tokens are numbered by their index in `tokens`."""

    tokens: Int64[Tensor, " support"]
    target: Float64[np.ndarray, " support"]
    rounds: tuple[PairSelection, ...]
    winner_law: Float64[np.ndarray, " support"]

    def index(self, token: int) -> int:
        return int(torch.searchsorted(self.tokens, token))

    def accept_prob(self, z: int) -> float:
        """min(1, p_z / x_z); x_z is positive for every z that can be selected."""
        return min(1.0, float(self.target[z] / self.winner_law[z]))

    @property
    def accepted(self) -> Float64[Tensor, " support"]:
        return torch.from_numpy(np.minimum(self.target, self.winner_law)).to(self.tokens.device)
