"""The fast twin of `verify/optimal.py`: laws in, decisions out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law, SparseLaw
from monge.core.proposal import Iid, Mixed
from monge.verify.fast.one_node import NodeLine
from monge.verify.fast.scores import Lines, Scores
from monge.verify.fast.trials import BEYOND, padded
from monge.verify.flow import Flow
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """The outcome of the draws of a node.

    Args:
        token: The accepted draw, or `None`.
        token_ids: Support of the draft law, `[support]`.
        masses: a, what the rule accepts of each, `[support]`; `None` where a draw is accepted and
            nobody needs them.
    """

    token: int | None
    token_ids: Int64[Tensor, " support"]
    masses: Float64[Tensor, " support"] | None


def decide(p: Law, q: Law, drawn: Sequence[int], draws: Draws) -> Decision:
    """Accept one of some independent draws from q, or none; two uniforms a draw."""
    part = q.sparse()
    token_ids, p_masses = part.token_ids, p.at(part.token_ids)
    line = NodeLine.build(p_masses.cpu().numpy(), part.probs.cpu().numpy(), len(drawn))
    winner = line.winner(_columns(token_ids.cpu().numpy(), drawn), draws)
    if winner is not None:
        return Decision(token=drawn[winner], token_ids=token_ids, masses=None)
    return Decision(
        token=None, token_ids=token_ids, masses=torch.from_numpy(line.masses).to(part.probs.device)
    )


def drawn_candidates(problem: NodeProblem) -> tuple[int, ...]:
    """The candidates that were drawn."""
    return (
        problem.candidates[len(problem.proposal.fixed) :]
        if isinstance(problem.proposal, Mixed)
        else problem.candidates
    )


def chances(problems: Sequence[NodeProblem]) -> list[Flow]:
    """Flows to the independent draws of many nodes, given their positions: one uniform a draw.

    A node's draws may differ from others' in number, law and support; there is one transfer from
    the device for all nodes.
    """
    if not problems:
        return []
    parts = [_draft_law(problem).sparse() for problem in problems]
    # Where a vector's price is its call, and a long one's its length, padded rows gain nothing.
    if parts[0].probs.is_cpu:
        return [_chances(problem, part) for problem, part in zip(problems, parts, strict=True)]
    p = [
        problem.scale * problem.target_law.at(part.token_ids)
        for problem, part in zip(problems, parts, strict=True)
    ]
    drawn = [drawn_candidates(problem) for problem in problems]
    positions = [
        [problem.draws.uniform() for _ in tokens]
        for problem, tokens in zip(problems, drawn, strict=True)
    ]
    device = parts[0].probs.device
    lines = Lines.build(
        padded(p),
        padded([part.probs for part in parts]),
        torch.tensor(list(map(len, drawn))).to(device, non_blocking=True),
    )
    tokens = padded([torch.tensor(row).to(device, non_blocking=True) for row in drawn], value=-1)
    columns = _columns_of(padded([part.token_ids for part in parts], value=BEYOND), tokens)
    uniforms = padded(
        [torch.tensor(row, dtype=torch.float64).to(device, non_blocking=True) for row in positions]
    )
    probs = Scores.of(lines, columns, uniforms).win_probs().tolist()
    return [
        Flow(
            accept_probs=_by_token(own, row),
            token_ids=part.token_ids,
            masses=masses[: part.token_ids.numel()],
        )
        for own, row, part, masses in zip(drawn, probs, parts, lines.masses, strict=True)
    ]


def _chances(problem: NodeProblem, part: SparseLaw) -> Flow:
    """The same at one node on the CPU."""
    drawn = drawn_candidates(problem)
    positions = [problem.draws.uniform() for _ in drawn]
    p = (problem.scale * problem.target_law.at(part.token_ids)).numpy()
    line = NodeLine.build(p, part.probs.numpy(), len(drawn))
    probs = line.win_probs(_columns(part.token_ids.numpy(), drawn), positions)
    return Flow(
        accept_probs=_by_token(drawn, probs),
        token_ids=part.token_ids,
        masses=torch.from_numpy(line.masses),
    )


def _draft_law(problem: NodeProblem) -> Law:
    assert isinstance(problem.proposal, Iid | Mixed), "only independent draws are coupled"
    return problem.proposal.law


def _columns(token_ids: Int64[np.ndarray, " support"], drawn: Sequence[int]) -> list[int]:
    """Places of drawn tokens in the support, -1 for one outside it."""
    found = np.minimum(np.searchsorted(token_ids, drawn), token_ids.size - 1)
    return np.where(token_ids[found] == drawn, found, -1).tolist()


def _columns_of(
    token_ids: Int64[Tensor, "nodes support"], drawn: Int64[Tensor, "nodes draws"]
) -> Int64[Tensor, "nodes draws"]:
    """The same for many nodes, ids padded beyond all tokens."""
    found = torch.searchsorted(token_ids, drawn).clamp_max(token_ids.shape[1] - 1)
    return torch.where(token_ids.gather(1, found) == drawn, found, -1)


def _by_token(tokens: Sequence[int], probs: Sequence[float]) -> dict[int, float]:
    """Probabilities of distinct tokens: the sum over a token's draws."""
    total = dict.fromkeys(tokens, 0.0)
    for token, prob in zip(tokens, probs, strict=False):  # rows are padded
        total[token] += prob
    return total
