"""The rules that try candidates one after another, at many nodes at once. Their plain twins are the rules' own `emit`.

p = target law, q = draft law, K = number of candidates tried. Masses are not normalised between two trials: with P the part of
p that the rejections so far have left, and M its total, a test of x against `P / M` is one of `P_x` against `M q_x`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.core.draws import Draws, PeekableDraws
from monge.core.law import DenseLaw, Law
from monge.verify.fast.padding import BEYOND, padded
from monge.verify.fast.remainders import draw_remainders


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """One node's candidates.

    Args:
        target_law: p.
        draft_law: q.
        fixed: Deterministic candidates, tried first, each against the point mass at it; q gives them no mass.
        drawn: Draws from q, tried in this order.
        draws: Source of randomness.
    """

    target_law: Law
    draft_law: Law
    fixed: tuple[int, ...] = ()
    drawn: tuple[int, ...]
    draws: Draws

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.fixed + self.drawn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trials:
    """The same for some nodes, on columns: the tokens of q, then the deterministic candidates.

    Args:
        token_ids: Tokens of the columns, beyond all tokens where padded, `[nodes, columns]`.
        p: Their target masses, zero where padded, `[nodes, columns]`.
        q: Their draft masses, zero at deterministic candidates and where padded, `[nodes, columns]`.
        beyond: p outside the columns, `[nodes, 1]`.
        columns: Column of each candidate, -1 where padded, `[nodes, tries]`.
        is_fixed: Whether it is deterministic, `[nodes, tries]`.
        uniforms: What decides each test, `[nodes, tries]`.
    """

    token_ids: Int64[Tensor, "nodes columns"]
    p: Float64[Tensor, "nodes columns"]
    q: Float64[Tensor, "nodes columns"]
    beyond: Float64[Tensor, "nodes 1"]
    columns: Int64[Tensor, "nodes tries"]
    is_fixed: Bool[Tensor, "nodes tries"]
    uniforms: Float64[Tensor, "nodes tries"]

    @classmethod
    def of(cls, nodes: Sequence[Trial], uniforms: Sequence[Sequence[float]]) -> "Trials":
        """The columns of some nodes; one transfer to the device for all candidates and uniforms."""
        parts = [node.draft_law.sparse() for node in nodes]
        device = parts[0].probs.device
        drawn_ids = padded([part.token_ids for part in parts], BEYOND)
        q = padded([part.probs for part in parts])
        num_fixed = max(len(node.fixed) for node in nodes)
        fixed_ids = _table([node.fixed for node in nodes], num_fixed, BEYOND, device)
        token_ids = torch.cat([drawn_ids, fixed_ids], 1)
        p = torch.stack([_masses(node.target_law, row) for node, row in zip(nodes, token_ids, strict=True)])
        tries = max(len(node.tokens) for node in nodes)
        tokens = _table([node.tokens for node in nodes], tries, BEYOND, device)
        counts = torch.tensor([[len(node.fixed), len(node.tokens)] for node in nodes], device=device)
        place = torch.arange(tries, device=device)
        is_fixed = place < counts[:, :1]
        columns = torch.where(is_fixed, drawn_ids.shape[1] + place, _found(drawn_ids, tokens))
        return cls(
            token_ids=token_ids,
            p=p,
            q=torch.nn.functional.pad(q, (0, num_fixed)),
            beyond=(1.0 - p.sum(1, keepdim=True)).clamp_min(0.0),
            columns=torch.where(place < counts[:, 1:], columns, -1),
            is_fixed=is_fixed,
            uniforms=torch.tensor(
                [[*row, *[1.0] * (tries - len(row))] for row in uniforms], dtype=torch.float64, device=device
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What became of the candidates.

    Args:
        winners: Place of the accepted one among those tried, -1 where none is, `[nodes]`.
        left: What is emitted of each column where none is, beside all of p outside the columns; in total any mass,
            `[nodes, columns]`.
    """

    winners: Int64[Tensor, " nodes"]
    left: Float64[Tensor, "nodes columns"]


Method = Callable[[Trials], Outcome]


def emitted(nodes: Sequence[Trial], method: Method) -> list[int]:
    """The token emitted at each node; every node draws as many uniforms as with the plain rule, and the same."""
    assert all(isinstance(node.draws, PeekableDraws) for node in nodes), "see `can_batch`"
    ahead = [node.draws.peek(len(node.tokens) + 1) for node in nodes if isinstance(node.draws, PeekableDraws)]
    trials = Trials.of(nodes, [row[:-1] for row in ahead])
    outcome = method(trials)
    winners = outcome.winners.tolist()
    refused = [row for row, winner in enumerate(winners) if winner < 0]
    tokens = [node.tokens[winner] for node, winner in zip(nodes, winners, strict=True)]
    if refused:
        index = torch.tensor(refused, device=trials.p.device)
        rest = draw_remainders(
            [nodes[row].target_law for row in refused],
            trials.token_ids[index],
            outcome.left[index],
            [ahead[row][-1] for row in refused],
        )
        for row, token in zip(refused, rest, strict=True):
            tokens[row] = token
    for node, winner in zip(nodes, winners, strict=True):
        for _ in range(winner + 1 if winner >= 0 else len(node.tokens) + 1):
            node.draws.uniform()
    return tokens


def recursive(trials: Trials) -> Outcome:
    """Recursive rejection: q, repeated for every draw; see `verify/rrs.py`."""
    return _recursive(trials, is_shrinking=False)


def recursive_without_replacement(trials: Trials) -> Outcome:
    """Recursive rejection where q loses every candidate that was refused; see `verify/rrs_without_replacement.py`."""
    return _recursive(trials, is_shrinking=True)


def _recursive(trials: Trials, is_shrinking: bool) -> Outcome:
    left, q = trials.p, trials.q
    total, drawn_total = torch.ones_like(trials.beyond), torch.ones_like(trials.beyond)
    winners = torch.full_like(trials.columns[:, 0], -1)
    for place in range(trials.columns.shape[1]):
        column = trials.columns[:, place, None]
        is_tried, is_fixed = column >= 0, trials.is_fixed[:, place, None]
        at = column.clamp_min(0)
        own = left.gather(1, at)
        against = torch.where(is_fixed, total, total * q.gather(1, at) / drawn_total)
        is_hit = is_tried & (trials.uniforms[:, place, None] < own / against) & (winners[:, None] < 0)
        winners = torch.where(is_hit[:, 0], place, winners)
        without = left.scatter(1, at, 0.0)
        rest = torch.where(is_fixed, without, (left - total * q / drawn_total).clamp_min(0.0))
        rest_total = rest.sum(1, keepdim=True) + trials.beyond
        is_step = is_tried & (rest_total > 0.0)  # nothing is left only where x was certain to be accepted
        left, total = torch.where(is_step, rest, left), torch.where(is_step, rest_total, total)
        if is_shrinking:
            q = torch.where(is_tried, q.scatter(1, at, 0.0), q)
            drawn_total = q.sum(1, keepdim=True)
    return Outcome(winners=winners, left=left)


def k_seq(trials: Trials) -> Outcome:
    """One scaled ratio for every draw; see `verify/k_seq.py`."""
    is_tried = trials.columns >= 0
    width = is_tried.sum(1, keepdim=True).to(torch.float64)
    rho = _divisors(trials, width)
    taken = (trials.p / rho).minimum(trials.q)
    at = trials.columns.clamp_min(0)
    is_hit = is_tried & (trials.uniforms < taken.gather(1, at) / trials.q.gather(1, at))
    # argmax finds the first of equal values
    winners = torch.where(is_hit.any(1), is_hit.to(torch.int8).argmax(1), -1)
    left = (trials.p - _gammas(trials, width, rho) * taken).clamp_min(0.0)
    return Outcome(winners=winners, left=left)


def _divisors(trials: Trials, width: Float64[Tensor, "nodes 1"]) -> Float64[Tensor, "nodes 1"]:
    """The smallest rho in [1, K] that is not below its gamma: bisection until no float lies between."""
    low, high = torch.ones_like(width), width.clone()
    high = torch.where(_gammas(trials, width, low) <= low, low, high)
    while True:
        rho = 0.5 * (low + high)
        is_between = (low < rho) & (rho < high)
        if not bool(is_between.any()):
            return high
        is_enough = _gammas(trials, width, rho) <= rho
        high = torch.where(is_between & is_enough, rho, high)
        low = torch.where(is_between & ~is_enough, rho, low)


def _gammas(trials: Trials, width: Tensor, rho: Tensor) -> Float64[Tensor, "nodes 1"]:
    beta = (trials.p / rho).minimum(trials.q).sum(1, keepdim=True).clamp_max(1.0)
    gamma = -torch.expm1(width * torch.log1p(-beta)) / beta
    return torch.where((beta > 0.0) & (beta < 1.0), gamma, 1.0)  # disjoint supports, or p equals q


def can_batch(draws: Sequence[Draws]) -> bool:
    """Whether all sources can be looked at ahead."""
    return all(isinstance(one, PeekableDraws) for one in draws)


def _masses(law: Law, token_ids: Int64[Tensor, " columns"]) -> Float64[Tensor, " columns"]:
    if isinstance(law, DenseLaw):
        return torch.where(token_ids == BEYOND, 0.0, law.at(token_ids.clamp_max(law.probs.numel() - 1)))
    return law.at(token_ids)


def _found(token_ids: Int64[Tensor, "nodes columns"], wanted: Int64[Tensor, "nodes tries"]) -> Int64[Tensor, "nodes tries"]:
    return torch.searchsorted(token_ids, wanted).clamp_max(token_ids.shape[1] - 1)


def _table(rows: Sequence[tuple[int, ...]], width: int, value: int, device: torch.device) -> Int64[Tensor, "rows width"]:
    table = [[*row, *[value] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=torch.int64, device=device).reshape(len(rows), width)
