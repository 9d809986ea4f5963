"""Applies a stop rule to a growing tree: decides whether another level pays."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.core.stopping import Evidence, StopRule
from monge.core.tree import GrowingTree


class StopMonitor:
    """Applies a `StopRule` to one growing tree, level by level, and records evidence.

    Whether a level is drawn depends on the logits at the nodes above it. Whether a level is read
    depends on tokens that stay in the tree. Both are known before the next level is drawn, so
    nothing is anticipated.

    Args:
        tree: The tree.
        stop: The rule.
        draft_ids: The tokens that logits are about, ascending; `None` for all of the target's.

    Attributes:
        evidence: For the record of the round.
    """

    def __init__(
        self,
        tree: GrowingTree,
        stop: StopRule,
        draft_ids: Int64[Tensor, " some"] | None = None,
    ) -> None:
        self.evidence = Evidence()
        self._tree, self._stop, self._draft_ids = tree, stop, draft_ids
        self._reach = {0: 1.0}
        self._paths: dict[int, tuple[int, ...]] = {0: ()}
        self._acceptance: dict[int, float] = {}
        self._logits: Tensor | None = None

    def draws(self, nodes: Sequence[int], logits: Float[Tensor, "nodes some"]) -> bool:
        """Return whether to draw the children of these nodes, given their logits."""
        self._logits = logits
        self.evidence.levels_read += 1
        if not self._stop.needs_confidence:
            return True
        # Several times faster than logsumexp.
        confidences = logits.softmax(dim=-1).amax(dim=-1).tolist()
        depth, gain = self._tree.depths[nodes[0]] + 1, 0.0
        for node, confidence in zip(nodes, confidences, strict=True):
            self.evidence.confidences[self._path(node)] = confidence
            acceptance = self._acceptance[node] = self._stop.acceptance(depth, confidence)
            gain += self._reach[node] * acceptance
        return self._stop.draws(depth, gain)

    def reads(self, nodes: Sequence[int], frontier: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes of the frontier that the network reads next."""
        if self._stop.min_token_prob is not None:
            probs = self._token_probs(nodes)
            for child, prob in probs.items():
                self.evidence.token_probs[self._path(child)] = prob
            frontier = [child for child in frontier if probs[child] >= self._stop.min_token_prob]
        if not self._stop.needs_confidence or not frontier:
            return tuple(frontier)
        self._follow(nodes)
        depth = self._tree.depths[frontier[0]] + 1
        gain = sum(
            self._reach[child]
            * self._stop.next_acceptance(depth, self._acceptance[self._tree.parents[child]])
            for child in frontier
        )
        return tuple(frontier) if self._stop.reads(depth, gain) else ()

    def _follow(self, nodes: Sequence[int]) -> None:
        """Divide the chance of acceptance among the children by their probabilities."""
        children: dict[int, list[int]] = {node: [] for node in nodes}
        for child in self._new():
            if (siblings := children.get(self._tree.parents[child])) is not None:
                siblings.append(child)
        probs = self._token_probs(nodes) if any(len(own) > 1 for own in children.values()) else {}
        for node, own in children.items():
            reach = self._reach[node] * self._acceptance[node]
            if len(own) == 1:
                self._reach[own[0]] = reach
                continue
            total = sum(probs[child] for child in own)
            for child in own:
                self._reach[child] = reach * (
                    probs[child] / total if total > 0.0 else 1.0 / len(own)
                )

    def _new(self) -> range:
        """Return the nodes of the last level."""
        depths = self._tree.depths
        return range(depths.index(depths[-1]), len(depths))

    def _token_probs(self, nodes: Sequence[int]) -> dict[int, float]:
        """Return the probability of each child of the nodes at temperature 1."""
        assert self._logits is not None
        row_of = {node: row for row, node in enumerate(nodes)}
        children = [child for child in self._new() if self._tree.parents[child] in row_of]
        if not children:
            return {}
        rows = torch.tensor([row_of[self._tree.parents[child]] for child in children]).to(
            self._logits.device, non_blocking=True
        )
        tokens = torch.tensor([self._tree.token_ids[child] for child in children]).to(
            self._logits.device, non_blocking=True
        )
        if self._draft_ids is not None:
            tokens = torch.searchsorted(self._draft_ids, tokens)
        return dict(zip(children, self._logits.softmax(dim=-1)[rows, tokens].tolist(), strict=True))

    def _path(self, node: int) -> tuple[int, ...]:
        """Return the tokens on the path to a node."""
        if node not in self._paths:
            self._paths[node] = (*self._path(self._tree.parents[node]), self._tree.token_ids[node])
        return self._paths[node]
