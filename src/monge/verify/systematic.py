"""The optimal rule for systematic draws: a schedule of [0, 1], read at the position that decided the candidates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law, SparseLaw
from monge.core.lazy_laws import below
from monge.core.proposal import Deterministic, Proposal
from monge.core.systematic import Cells, Systematic
from monge.transport.systematic import Schedule, earliest_deadline_first
from monge.verify.flow import Flow, FlowRule
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True)
class EarliestDeadline(FlowRule):
    """Give every position of [0, 1] to the candidate with target mass left that will soonest be on offer no more.

    Law:
        The emitted token follows p for candidates drawn by one position (`Systematic`), and for
        deterministic candidates, which are one cell. What is accepted is a function of the
        position, and completed: the law is p for every schedule.

    Rule:
        Token i is on offer on a window of [0, 1] and may run for a time p_i in all. At each
        position the candidate with time left whose window closes first runs; y_i is the time that i
        gets. The candidates tell their cell, and in it the position is uniform: accept i with
        probability (time of i in the cell) / (length of the cell); otherwise, where nothing runs,
        emit y proportional to `p - y`. Acceptance is `sum y`, the optimum for these candidates; no
        residual token is one of them.

    Cost:
        O(M K log K) for M tokens that can be offered, in plain Python: a draft law cut to its 64 or
        256 most probable tokens keeps it small. O(vocab) after a rejection.

    Reference:
        Own construction, novelty not established; see `transport/systematic.py`.
    """

    accepts = frozenset[type[Proposal]]({Systematic, Deterministic})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        p = target_law
        if not isinstance(proposal, Systematic):
            # One cell, which everything shares: the target walk is optimal.
            return draws.categorical(p)
        schedule = _schedule(p, 1.0, proposal.cells)
        accept_probs = _accept_probs(proposal.cells, schedule, tuple(candidates))
        accepted = sum(accept_probs.values())
        if draws.bernoulli(min(1.0, accepted)):
            tokens = sorted(token for token, prob in accept_probs.items() if prob > 0.0)
            masses = torch.tensor(
                [accept_probs[token] / accepted for token in tokens], dtype=torch.float64
            )
            return draws.categorical(SparseLaw(torch.tensor(tokens), masses))
        return draws.categorical(below(p, *_masses(p, schedule)))

    def flow(self, problem: NodeProblem) -> Flow:
        proposal, candidates = problem.proposal, problem.candidates
        cells = proposal.cells if isinstance(proposal, Systematic) else Cells((candidates,), (1.0,))
        schedule = _schedule(problem.target_law, problem.scale, cells)
        token_ids, masses = _masses(problem.target_law, schedule)
        return Flow(
            accept_probs=_accept_probs(cells, schedule, candidates),
            token_ids=token_ids,
            masses=masses,
        )


def _schedule(p: Law, scale: float, cells: Cells) -> Schedule:
    tokens = sorted({token for candidates in cells.candidates for token in candidates})
    like = p.sparse().token_ids  # the laws' device
    sizes = (scale * p.at(like.new_tensor(tokens))).tolist()
    return earliest_deadline_first(cells, dict(zip(tokens, sizes, strict=True)))


def _accept_probs(
    cells: Cells, schedule: Schedule, candidates: tuple[int, ...]
) -> dict[int, float]:
    cell = cells.candidates.index(candidates)
    return {
        token: schedule.times[cell].get(token, 0.0) / cells.lengths[cell] for token in candidates
    }


def _masses(
    p: Law, schedule: Schedule
) -> tuple[Int64[Tensor, " support"], Float64[Tensor, " support"]]:
    like = p.sparse()
    tokens = sorted(schedule.masses)
    return like.token_ids.new_tensor(tokens), like.probs.new_tensor(
        [schedule.masses[token] for token in tokens]
    )
