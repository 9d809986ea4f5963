"""The two passes of Layer Verification over one tree.

Weights from the root down, a decision from the deepest layer up.

p = target law. H_j is the tree down to layer j, with all that its flows have drawn. *Theorem.* Let
w be adapted to H, not above one in any layer together with what is kept there from above, and let
every node v pass on `E[w_vx | H_j] = F_v(x) <= w_v p(x)` and keep R_v = w_v p - F_v in its own
layer, or pass on w_vx and keep e_v in the layer of its children, with `E[w_vx + e_v(x) | H_j] = w_v
p(x)`. Then the decision from below is lossless, and E[tau] is the expected sum of all w.

*Proof.* In both cases r_j + f_j = 1 - (what is passed on from layer j) = E[f_(j+1) | H_j], and r_L
+ f_L = 1. By induction from below the chance to get past all layers deeper than j is r_j + f_j
given H_j, so R is emitted with mass E[R] wherever it is kept. With W(u) = E[w_u], what is emitted
at v is then W(v) p(x | v) - W(vx); continued by the target, these terms telescope to the law of the
whole text, and P(tau >= j) telescopes to the sum of W over layer j.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monge.core.law import Law, LawSequence, SparseLaw
from monge.core.verdict import Verdict
from monge.verify.base import NodeProblem, ScoredTree
from monge.verify.flow import Emission, Flow, below
from monge.verify.whole_tree import verdict_at


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeResidual:
    """The part of its weight that a node keeps.

    Args:
        node: The node.
        mass: |R|.
        scale: s of its layer.
        flow: The part that was passed on; `None` if the node has no candidates.
    """

    node: int
    mass: float
    scale: float = 1.0
    flow: Flow | Emission | None = None

    def law(self, target_laws: LawSequence) -> Law:
        """R, normalised."""
        if self.flow is None:
            return target_laws[self.node]
        if isinstance(self.flow, Emission):
            return self.flow.leftover_law
        return below(target_laws[self.node], self.flow.token_ids, self.flow.masses, self.scale)


class LayerPass:
    """The passes over one tree.

    Args:
        scored: Tree, target laws and draws.
    """

    def __init__(self, scored: ScoredTree) -> None:
        self._scored = scored
        self._weights = {0: 1.0}  # of the layer's nodes, without those of weight zero
        self._kept: list[list[NodeResidual]] = [[]]  # by layer
        self._free: list[float] = [0.0]  # f, by layer
        self.expected_accepted = 0.0
        """Sum of all weights below the root so far, whose mean is E[tau] once all layers have theirs."""

    @property
    def is_open(self) -> bool:
        """True if some node of the layer has candidates."""
        return bool(self._parents())

    def problems(self) -> Sequence[NodeProblem]:
        """The questions to the inner rule, one for every node of the layer that has candidates."""
        scale = self._scale()
        return [self._scored.problem(node, scale) for node in self._parents()]

    def descend(self, flows: Sequence[Flow | Emission]) -> None:
        """Give the next layer its weights."""
        tree, scale, below = self._scored.tree, self._scale(), dict[int, float]()
        from_above: list[NodeResidual] = []
        parents = self._parents()
        self._keep_leaves()
        for node, flow in zip(parents, flows, strict=True):
            part = self._weights[node] / scale
            for child in dict.fromkeys(tree.candidates[node]):
                weight = part * flow.accept_probs[tree.token_ids[child]]
                if weight > 0.0:
                    below[child] = weight
            if isinstance(flow, Emission):
                from_above.append(NodeResidual(node=node, mass=part * flow.leftover, flow=flow))
            else:
                mass = max(0.0, self._weights[node] - part * float(flow.masses.sum()))
                self._kept[-1].append(NodeResidual(node=node, mass=mass, scale=scale, flow=flow))
        self._weights = below
        self.expected_accepted += sum(below.values())
        self._kept.append(from_above)
        self._free.append(
            max(0.0, 1.0 - sum(below.values()) - sum(kept.mass for kept in from_above))
        )

    def ascend(self) -> Verdict:
        """Decide where to stop, and emit."""
        self._keep_leaves()
        draws, layer = self._scored.draws, len(self._kept) - 1
        first = next(index for index, kept in enumerate(self._kept) if kept)
        while layer > first and not (self._kept[layer] and draws.bernoulli(self._stop_prob(layer))):
            layer -= 1
        kept = self._kept[layer]
        masses = torch.tensor([one.mass for one in kept], dtype=torch.float64)
        rows = masses.nonzero().squeeze(-1)
        # Where nothing is kept the layer is never reached, but for rounding.
        row = (
            draws.categorical(SparseLaw(rows, masses[rows] / masses.sum()))
            if rows.numel() > 1
            else int(masses.argmax())
        )
        token = draws.categorical(kept[row].law(self._scored.target_laws))
        return verdict_at(self._scored.tree, kept[row].node, token)

    def _stop_prob(self, layer: int) -> float:
        mass = sum(kept.mass for kept in self._kept[layer])
        return mass / (mass + self._free[layer]) if mass > 0.0 else 0.0

    def _parents(self) -> list[int]:
        return [node for node in self._weights if self._scored.tree.candidates[node]]

    def _scale(self) -> float:
        # Above one by rounding only.
        return min(1.0, sum(self._weights[node] for node in self._parents()))

    def _keep_leaves(self) -> None:
        leaves = [node for node in self._weights if not self._scored.tree.candidates[node]]
        self._kept[-1] += [NodeResidual(node=node, mass=self._weights[node]) for node in leaves]
