"""Candidates that are tried one after another, at many nodes at once; the plain twins are the rules' own `emit`.

p = target law, q = draft law.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from monge.core.draws import can_peek
from monge.core.errors import ProposalMismatchError
from monge.core.law import DenseLaw, Law, SparseLaw
from monge.verify.base import NodeProblem

BEYOND: Final = 2**62
"""Fills rows of increasing token ids, which stay increasing; exact also as the float it is passed on as."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trials:
    """The candidates of some nodes, on columns: the tokens of q, then the deterministic candidates.

    Args:
        token_ids: Tokens of the columns, beyond all tokens where padded, `[nodes, columns]`.
        p: Their target masses, zero where padded, `[nodes, columns]`.
        q: Their draft masses, zero at deterministic candidates and where padded, `[nodes,
            columns]`.
        beyond: p outside the columns, `[nodes, 1]`.
        columns: Column of each candidate, -1 where padded, `[nodes, tries]`.
        is_fixed: True for deterministic candidates, `[nodes, tries]`.
        uniforms: Uniforms that decide the tests, `[nodes, tries]`.
    """

    token_ids: Int64[Tensor, "nodes columns"]
    p: Float64[Tensor, "nodes columns"]
    q: Float64[Tensor, "nodes columns"]
    beyond: Float64[Tensor, "nodes 1"]
    columns: Int64[Tensor, "nodes tries"]
    is_fixed: Bool[Tensor, "nodes tries"]
    uniforms: Float64[Tensor, "nodes tries"]

    @classmethod
    def of(cls, nodes: Sequence[NodeProblem], uniforms: Sequence[Sequence[float]]) -> "Trials":
        """The columns of some nodes; one transfer to the device for all candidates and uniforms."""
        parts = [node.draft_law.sparse() for node in nodes]
        device = parts[0].probs.device
        drawn_ids = padded([part.token_ids for part in parts], BEYOND)
        q = padded([part.probs for part in parts])
        num_fixed = max(len(node.fixed) for node in nodes)
        fixed_ids = _table([node.fixed for node in nodes], num_fixed, BEYOND, device)
        token_ids = torch.cat([drawn_ids, fixed_ids], 1)
        p = torch.stack(
            [_masses(node.target_law, row) for node, row in zip(nodes, token_ids, strict=True)]
        )
        tries = max(len(node.candidates) for node in nodes)
        tokens = _table([node.candidates for node in nodes], tries, BEYOND, device)
        counts = torch.tensor([[len(node.fixed), len(node.candidates)] for node in nodes]).to(
            device, non_blocking=True
        )
        place = torch.arange(tries, device=device)
        is_fixed = place < counts[:, :1]
        is_tried, found = (
            place < counts[:, 1:],
            torch.searchsorted(drawn_ids, tokens).clamp_max(drawn_ids.shape[1] - 1),
        )
        if bool((is_tried & ~is_fixed & (drawn_ids.gather(1, found) != tokens)).any()):
            raise ProposalMismatchError(
                "a candidate lies outside the support of the law that it is said to be drawn from"
            )
        columns = torch.where(is_fixed, drawn_ids.shape[1] + place, found)
        return cls(
            token_ids=token_ids,
            p=p,
            q=torch.nn.functional.pad(q, (0, num_fixed)),
            beyond=(1.0 - p.sum(1, keepdim=True)).clamp_min(0.0),
            columns=torch.where(is_tried, columns, -1),
            is_fixed=is_fixed,
            uniforms=torch.tensor(
                [[*row, *[1.0] * (tries - len(row))] for row in uniforms],
                dtype=torch.float64,
                device=device,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The outcome of the tests.

    Args:
        winners: Place of the accepted one among those tried, -1 where none is, `[nodes]`.
        left: Mass of each column that is emitted where none is, beside all of p outside the
            columns; it need not be normalised, `[nodes, columns]`.
    """

    winners: Int64[Tensor, " nodes"]
    left: Float64[Tensor, "nodes columns"]


Method = Callable[[Trials], Outcome]


def emitted(nodes: Sequence[NodeProblem], method: Method) -> list[int]:
    """The token emitted at each node; every node draws as many uniforms as with the plain rule, and the same."""
    assert all(can_peek(node.draws) for node in nodes), "`TrialRule` asks first"
    ahead = [node.draws.peek(len(node.candidates) + 1) for node in nodes if can_peek(node.draws)]
    trials = Trials.of(nodes, [row[:-1] for row in ahead])
    outcome = method(trials)
    winners = outcome.winners.tolist()
    refused = [row for row, winner in enumerate(winners) if winner < 0]
    tokens = [node.candidates[winner] for node, winner in zip(nodes, winners, strict=True)]
    if refused:
        index = torch.tensor(refused).to(trials.p.device, non_blocking=True)
        rest = draw_remainders(
            [nodes[row].target_law for row in refused],
            trials.token_ids[index],
            outcome.left[index],
            [ahead[row][-1] for row in refused],
        )
        for row, token in zip(refused, rest, strict=True):
            tokens[row] = token
    for node, winner in zip(nodes, winners, strict=True):
        for _ in range(winner + 1 if winner >= 0 else len(node.candidates) + 1):
            node.draws.uniform()
    return tokens


def draw_remainders(
    laws: Sequence[Law],
    token_ids: Int64[Tensor, "nodes columns"],
    left: Float64[Tensor, "nodes columns"],
    positions: Sequence[float],
) -> list[int]:
    """Draw a token from what is left of each law: given masses on some tokens, the law itself on all others.

    Args:
        laws: p of each node.
        token_ids: Tokens whose mass is not that of p; padded beyond all tokens.
        left: Masses that are left of them.
        positions: Positions in the rest of each law, in [0, 1), by increasing token id.
    """
    dense = [law.probs for law in laws if isinstance(law, DenseLaw)]
    if len(dense) < len(laws) or len({probs.numel() for probs in dense}) > 1:
        return [
            _remainder(law, ids, masses).quantile(position)
            for law, ids, masses, position in zip(laws, token_ids, left, positions, strict=True)
        ]
    p = torch.stack(dense)
    is_token = token_ids < p.shape[1]
    places = torch.where(is_token, token_ids, 0)
    # Padding adds nothing to token 0; a plain scatter would write its zero over what is left of it.
    rest = p.scatter_add(
        1, places, torch.where(is_token, left - p.gather(1, places), 0.0)
    ).clamp_min(0.0)
    # All of p is accepted: rounding alone brings a caller here.
    is_empty = rest.amax(1, keepdim=True) == 0.0
    sums = torch.where(is_empty, p, rest).cumsum(1)
    wanted = (
        torch.tensor(positions, dtype=torch.float64).to(p.device, non_blocking=True).unsqueeze(1)
        * sums[:, -1:]
    )
    return torch.searchsorted(sums, wanted, right=True).squeeze(1).tolist()


def _remainder(
    p: Law, token_ids: Int64[Tensor, " columns"], left: Float64[Tensor, " columns"]
) -> Law:
    part = p.sparse()
    order = token_ids.argsort()
    token_ids, left = token_ids[order], left[order]
    index = torch.searchsorted(token_ids, part.token_ids).clamp_max(token_ids.numel() - 1)
    masses = torch.where(token_ids[index] == part.token_ids, left[index], part.probs)
    kept = masses > 0.0
    return SparseLaw(part.token_ids[kept], masses[kept] / masses.sum()) if bool(kept.any()) else p


def _masses(law: Law, token_ids: Int64[Tensor, " columns"]) -> Float64[Tensor, " columns"]:
    if isinstance(law, DenseLaw):
        return torch.where(
            token_ids == BEYOND, 0.0, law.at(token_ids.clamp_max(law.probs.numel() - 1))
        )
    return law.at(token_ids)


def _table(
    rows: Sequence[tuple[int, ...]], width: int, value: int, device: torch.device
) -> Int64[Tensor, "rows width"]:
    table = [[*row, *[value] * (width - len(row))] for row in rows]
    return (
        torch.tensor(table, dtype=torch.int64)
        .to(device, non_blocking=True)
        .reshape(len(rows), width)
    )


def padded(rows: Sequence[Tensor], value: float | int = 0.0) -> Tensor:
    """Rows `[length]` as `[rows, longest]`."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
