"""What the programs share: verdicts, draft laws, and trees as tensors."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.errors import OptionError, ProposalMismatchError
from monge.laws.quantiles import independent
from monge.laws.tree import depths_of, path_to

Children = Sequence[Sequence[int]]


class Verified(NamedTuple):
    """The verdicts of a batch.

    Attributes:
        path: Accepted nodes from the root's child down, -1 where no more are accepted, `[batch,
            depth]`.
        num_accepted: Their number, `[batch]`.
        next_token: The token after them, by correction or bonus; -1 where the target's logits at
            a node that decides are not finite, `[batch]`.
        num_uniforms: Uniforms used; those after them may be given to the next round, `[batch]`.
    """

    path: Int64[Tensor, "batch depth"]
    num_accepted: Int64[Tensor, " batch"]
    next_token: Int64[Tensor, " batch"]
    num_uniforms: Int64[Tensor, " batch"]


class DraftLaws(NamedTuple):
    """The laws from which the children of each node were drawn.

    Attributes:
        probs: Masses, float64, rows of nodes with children summing to 1, `[batch, nodes, support]`.
            Rows of leaves are not read.
        token_ids: Tokens of the masses, each once, with mass zero where padded, `[batch, nodes,
            support]`; `None` if the support is the vocabulary.
    """

    probs: Float64[Tensor, "batch nodes support"]
    token_ids: Int64[Tensor, "batch nodes support"] | None = None


def quantile(
    probs: Float64[Tensor, "*rows vocab"], positions: Float64[Tensor, " *rows"]
) -> Int64[Tensor, " *rows"]:
    """Return draws from laws, a uniform each; -1 where the law is NaN."""
    flat = probs.reshape(-1, probs.shape[-1])
    return independent(flat, positions.reshape(-1, 1)).view(positions.shape)


def num_uniforms(children: Children) -> int:
    """Return the most uniforms that any of the functions uses for a tree of this shape.

    That is two per candidate, one per node with candidates, and one for the token after them.
    """
    return 1 + sum(2 * len(siblings) + 1 for siblings in children if siblings)


def children_of(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the children of each node.

    Args:
        parents: Parent of each node: -1 for node 0, and a smaller number than its own for every
            other; `(-1, 0, 1, 2)` is a chain of three.
    """
    nodes = range(len(parents))
    if not nodes or parents[0] != -1 or any(not 0 <= parents[node] < node for node in nodes[1:]):
        raise ProposalMismatchError(
            f"parents: got {tuple(parents)}; expected -1 for node 0, and for every other node a "
            "smaller one"
        )
    return tuple(tuple(child for child in nodes if parents[child] == node) for node in nodes)


class TreeTensors(NamedTuple):
    """Shape of a tree, on a device.

    Attributes:
        children: Children of each node in drawing order, -1 where there are no more, `[nodes,
            width]`.
        paths: Nodes on the way to each node, -1 where there are no more, `[nodes, depth]`.
        depths: Distance of each node from the root, `[nodes]`.
    """

    children: Int64[Tensor, "nodes width"]
    paths: Int64[Tensor, "nodes depth"]
    depths: Int64[Tensor, " nodes"]

    # Made once a shape: a copy to a device cannot be captured in a graph.
    @staticmethod
    @lru_cache(maxsize=256)
    def of(children: tuple[tuple[int, ...], ...], device: torch.device) -> "TreeTensors":
        parents = [-1] * len(children)
        for node, siblings in enumerate(children):
            if any(not node < child < len(children) for child in siblings):
                raise ProposalMismatchError(
                    f"children of node {node}: got {siblings}; expected nodes from {node + 1} to "
                    f"{len(children) - 1}, a child after its parent"
                )
            for child in siblings:
                if parents[child] not in {-1, node}:
                    raise ProposalMismatchError(
                        f"children: node {child} is a child of nodes {parents[child]} and {node}; "
                        "expected one parent of each node"
                    )
                parents[child] = node
        return TreeTensors(
            _table(children, device),
            _table([path_to(node, parents) for node in range(len(parents))], device),
            torch.tensor(depths_of(tuple(parents))).to(device, non_blocking=True),
        )


class Ways(NamedTuple):
    """How the children of a tree were drawn, on a device.

    Attributes:
        fixed: Deterministic children of each node, -1 where there are no more, `[nodes, fixed]`.
        drawn: Drawn children in the same form, repeats kept, `[nodes, draws]`.
        layers: Nodes of each depth, leaves first, in the same form, `[depths, nodes]`.
        counts: Number of drawn children of each node.
        order: `layers` as numbers.
    """

    fixed: Int64[Tensor, "nodes fixed"]
    drawn: Int64[Tensor, "nodes draws"]
    layers: Int64[Tensor, "depths most"]
    counts: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(
        children: tuple[tuple[int, ...], ...], num_fixed: tuple[int, ...], device: torch.device
    ) -> "Ways":
        fixed = checked_fixed(children, num_fixed)
        pairs = list(zip(children, fixed, strict=True))
        order = tuple(
            tuple(sorted(level, key=lambda node: bool(children[node])))
            for level in _levels(children)
        )
        return Ways(
            _table([siblings[:count] for siblings, count in pairs], device),
            _table([siblings[count:] for siblings, count in pairs], device),
            _table(order, device),
            tuple(len(siblings) - count for siblings, count in pairs),
            order,
        )


def checked_fixed(
    children: tuple[tuple[int, ...], ...], num_fixed: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the number of deterministic children of each node.

    Raises:
        ProposalMismatchError: If it is not given for each node, or exceeds the number of children.
    """
    fixed = num_fixed or (0,) * len(children)
    if len(fixed) != len(children) or any(
        not 0 <= count <= len(siblings) for siblings, count in zip(children, fixed, strict=False)
    ):
        raise ProposalMismatchError(
            f"num_fixed: got {num_fixed}; expected a number for each of {len(children)} nodes, no "
            "more than it has children"
        )
    return fixed


def _levels(children: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Nodes of each depth, siblings side by side."""
    levels = [[0]]
    while below := [child for node in levels[-1] for child in dict.fromkeys(children[node])]:
        levels.append(below)
    return levels


def frozen(children: Children) -> tuple[tuple[int, ...], ...]:
    """Return children in a form that can be a key."""
    return tuple(map(tuple, children))


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Int64[Tensor, "rows width"]:
    width = max(map(len, rows))
    table = [[*row, *[-1] * (width - len(row))] for row in rows]
    flat = torch.tensor(table, dtype=torch.int64).reshape(len(rows), width)
    return flat.to(device, non_blocking=True)


class BatchWalk:
    """The way of each request down its tree.

    Attributes:
        node: The last accepted node, `[batch]`.
        is_open: True while the last token was a candidate, `[batch]`.
    """

    def __init__(self, children: Children, token_ids: Int64[Tensor, "batch nodes"]) -> None:
        if len(children) != token_ids.shape[1]:
            raise ProposalMismatchError(
                f"token_ids have {token_ids.shape[1]} nodes, but children has {len(children)}"
            )
        self._tensors = TreeTensors.of(frozen(children), token_ids.device)
        self._token_ids = token_ids
        self.depth = self._tensors.paths.shape[1]
        self.node = torch.zeros_like(token_ids[:, 0])
        self.is_open = torch.ones_like(self.node, dtype=torch.bool)

    def candidates(self) -> Int64[Tensor, "batch width"]:
        """Return the tokens of the children of each request's node, -1 where there are no more."""
        children = self._tensors.children[self.node]
        return torch.where(children < 0, -1, self._token_ids.gather(1, children.clamp_min(0)))

    def follow(self, token: Int64[Tensor, " batch"]) -> None:
        """Go to the first child with the emitted token, and stop where there is none."""
        children = self._tensors.children[self.node]
        is_match = (self.candidates() == token[:, None]) & (token >= 0)[:, None]
        first = is_match.to(torch.int8).argmax(1, keepdim=True)  # the first of equal values
        self.is_open = self.is_open & is_match.any(1)
        self.node = torch.where(self.is_open, children.gather(1, first).squeeze(1), self.node)

    def verified(
        self, next_token: Int64[Tensor, " batch"], used: Int64[Tensor, " batch"]
    ) -> Verified:
        return Verified(
            path=self._tensors.paths[self.node],
            num_accepted=self._tensors.depths[self.node],
            next_token=next_token,
            num_uniforms=used,
        )


def check_uniforms(uniforms: Tensor, needed: int) -> None:
    """Raise `OptionError` if a request has fewer uniforms than needed."""
    if uniforms.shape[1] < needed:
        raise OptionError(f"uniforms: got {uniforms.shape[1]} a request; these trees need {needed}")


def next_uniform(
    uniforms: Float64[Tensor, "batch uniforms"], used: Int64[Tensor, " batch"]
) -> Float64[Tensor, " batch"]:
    """Return the next uniform of each request; requests that have used all of theirs do not read it."""
    return uniforms.gather(1, used.clamp_max(uniforms.shape[1] - 1)[:, None]).squeeze(1)


def next_uniforms(
    uniforms: Float64[Tensor, "batch uniforms"], used: Int64[Tensor, " batch"], count: int
) -> Float64[Tensor, "batch some"]:
    """Return the next `count` uniforms of each request."""
    at = used[:, None] + torch.arange(count, device=used.device)
    return uniforms.gather(1, at.clamp_max(uniforms.shape[1] - 1))


def at_node(values: Tensor, node: Int64[Tensor, " batch"]) -> Tensor:
    """The row of each request's node, `[batch, columns]`."""
    index = node[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, index).squeeze(1)


def draft_at(draft: DraftLaws, node: Int64[Tensor, " batch"]) -> tuple[Tensor, Tensor | None]:
    """Return draft masses and their tokens at a node of each request."""
    ids = None if draft.token_ids is None else at_node(draft.token_ids, node)
    return at_node(draft.probs, node), ids


def draft_of(draft: DraftLaws, node: int) -> tuple[Tensor, Tensor | None]:
    """Return draft masses and their tokens at the same node of all requests."""
    return draft.probs[:, node], None if draft.token_ids is None else draft.token_ids[:, node]
