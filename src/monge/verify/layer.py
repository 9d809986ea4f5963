"""Layer Verification: any coupling of a node, lifted to whole trees layer by layer.

Weights from the root down, a decision from the deepest layer up.

p = target law. H_j is the tree down to layer j, with all that its flows have drawn. *Theorem.* Let
w be adapted to H, not above 1 in any layer together with what is kept there from above, and let
every node v pass on `E[w_vx | H_j] = F_v(x) <= w_v p(x)` and keep R_v = w_v p - F_v in its own
layer, or pass on w_vx and keep e_v in the layer of its children, with `E[w_vx + e_v(x) | H_j] = w_v
p(x)`. Then the decision from below is lossless, and E[tau] is the expected sum of all w.

*Proof.* In both cases r_j + f_j = 1 - (what is passed on from layer j) = E[f_(j+1) | H_j], and r_L
+ f_L = 1. By induction from below the chance to get past all layers deeper than j is r_j + f_j
given H_j, so R is emitted with mass E[R] wherever it is kept. With W(u) = E[w_u], what is emitted
at v is then W(v) p(x | v) - W(vx); continued by the target, these terms telescope to the law of the
whole text, and P(tau >= j) telescopes to the sum of W over layer j.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from monge.core.registry import Registry
from monge.core.verdict import Verdict
from monge.laws.draws import Draws
from monge.laws.law import Law, LawSequence, SparseLaw
from monge.laws.proposal import (
    Deterministic,
    Iid,
    Independent,
    Mixed,
    Proposal,
    WithoutReplacement,
    entry_for,
)
from monge.laws.tree import TokenTree
from monge.verify.base import Verifier
from monge.verify.block import Block
from monge.verify.canonical import Canonical
from monge.verify.flow import Emission, Flow, FlowRule, total_of
from monge.verify.functional.optimum import layer
from monge.verify.greedy import Greedy
from monge.verify.k_seq import KSeq
from monge.verify.naive_tree import NaiveTree
from monge.verify.optimal import Optimal
from monge.verify.problem import NodeProblem, ScoredTree, verdict_at
from monge.verify.programs import Programs, walk
from monge.verify.recursive_rejection import RecursiveRejection
from monge.verify.recursive_rejection_without_replacement import (
    RecursiveRejectionWithoutReplacement,
)
from monge.verify.sample_and_match import SampleAndMatch
from monge.verify.speculative_sampling import SpeculativeSampling
from monge.verify.whole_tree import decided_part, walk_on

FLOW_RULES: Final[Registry[FlowRule]] = Registry(
    "node rule",
    {
        "sample_and_match": SampleAndMatch,
        "speculative_sampling": SpeculativeSampling,
        "recursive_rejection": RecursiveRejection,
        "recursive_rejection_without_replacement": RecursiveRejectionWithoutReplacement,
        "naive_tree": NaiveTree,
        "k_seq": KSeq,
        "greedy": Greedy,
        "canonical": Canonical,
        "optimal": Optimal,
    },
    base=FlowRule,
)
"""The node rules that can be lifted to whole trees, by name."""

RULE_OF: Final[Mapping[type[Proposal], FlowRule]] = {
    Deterministic: SampleAndMatch(),
    Iid: Optimal(),
    Mixed: Optimal(),
    WithoutReplacement: RecursiveRejectionWithoutReplacement(),
    Independent: Canonical(),
}
"""Default rule of every way of drawing, and of its subclasses: the optimal rule, if it is known."""

ONE_DRAW: Final = SpeculativeSampling()
"""Optimal for a single draw, with nothing to sort and no positions to draw."""

ONE_DRAW_BESIDE: Final = Greedy()
"""Optimal for a single draw beside deterministic candidates."""

_PROGRAMS: Final = Programs(
    by_kind={Iid: layer, Mixed: layer, Deterministic: walk}, takes_fixed_nodes=True
)


@dataclass(frozen=True, slots=True)
class Layer(Verifier):
    """Weigh all paths of the tree from the root down with a coupling at each node, then decide from the deepest layer up.

    Law:
        The accepted path, the token after it, and the target's own continuation together follow the
        target's law, for every way of drawing that the inner rule accepts. Which nodes of a level
        have candidates, and how these are drawn, may depend on earlier levels only, as
        `GrowingTree` makes sure; the scale s is then known before they are drawn. Below a node with
        candidates of `Arbitrary` origin sample and match decides.

    Rule:
        Down: the root has w = 1. In each layer let s be the sum of w over the nodes with
        candidates. At such a node v the inner rule couples its candidates with s p: it accepts x
        with probability pi(x | candidates), and with mass `y(x) = E[pi] <= s p(x)` on average. The
        child of x gets `(w_v / s) pi(x)`, and v keeps `R_v = w_v p - (w_v / s) y`. A node without
        candidates keeps `R_v = w_v p`. Where y has no closed form, what the inner rule emits beside
        the candidates, `(w_v / s) e(. | candidates)`, is kept in the layer of the children instead.
        Up: in each layer let r be the sum of all |R|, and f be 1 minus the sum of all w and of what
        is kept from above. With probability `r / (r + f)` stop here: pick R with probability |R| /
        r, emit `y ~ R`. The first layer always stops. The expected number of accepted tokens is the
        expected sum of all w: in the first layer the inner rule's own acceptance; deeper, a smaller
        s lets it accept a larger part of s p than node by node.

    Cost:
        A flow for every node with candidates and w > 0. Of the other nodes, only that at which the
        decision stops needs the target's law. A chain of single draws is decided by `block`, the
        same rule.

    Reference:
        Layer Verification (Cha, Cho, Yun, AdaptFM workshop at ICML 2026), from its abstract: the
        form here is re-derived, the proof our own. For one candidate per node it is Block
        Verification (Sun et al., arXiv 2403.10444); with a greedy draw, our reading of UniVer
        (arXiv 2605.04543).

    Args:
        inner: A node rule, or its name with settings; `None` takes the best known rule for the way
            each node was drawn.
    """

    inner: FlowRule | str | None = None
    accepts: frozenset[type[Proposal]] = field(init=False, repr=False, compare=False)
    max_width: int | None = field(init=False, repr=False, compare=False)
    is_lossless: bool = field(init=False, repr=False, compare=False)
    is_enumerable: bool = field(init=False, repr=False, compare=False)
    programs: Programs | None = field(init=False, repr=False, compare=False)
    _rules: tuple[FlowRule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rule = None if self.inner is None else FLOW_RULES.of(self.inner)
        rules = (
            tuple(dict.fromkeys((ONE_DRAW, ONE_DRAW_BESIDE, *RULE_OF.values())))
            if rule is None
            else (rule,)
        )
        derived = {
            "_rules": rules,
            "accepts": frozenset(RULE_OF) if rule is None else rule.accepts,
            "max_width": None if rule is None else rule.max_width,
            "is_lossless": all(rule.is_lossless for rule in rules),
            "is_enumerable": all(inner.is_enumerable for inner in rules),
            "programs": _PROGRAMS if rule is None else None,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def title(self) -> str:
        return "Layer" if self.inner is None else f"Layer({type(self._rules[0]).__name__})"

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        if self.inner is None and _is_block(tree):
            return Block().verify(tree, target_laws, draws)
        scored = ScoredTree(tree=tree, target_laws=target_laws, draws=draws)
        layers = LayerPass(replace(scored, tree=decided_part(self, tree, target_laws)))
        while layers.is_open:
            layers.descend([self.flow(problem) for problem in layers.problems()])
        return walk_on(scored, layers.ascend())

    def flow(self, problem: NodeProblem) -> Flow | Emission:
        """The flow of the inner rule at a node."""
        return (_best_rule(problem) if self.inner is None else self._rules[0]).flow(problem)


def _is_block(tree: TokenTree) -> bool:
    """Return whether a tree is a chain of single draws, whose widths are declared and not drawn."""
    pairs = zip(tree.proposals, tree.candidates, strict=True)
    drawn = [isinstance(proposal, Iid) and len(nodes) == 1 for proposal, nodes in pairs if nodes]
    return bool(drawn) and all(drawn) and len(drawn) == tree.num_nodes - 1


def _best_rule(problem: NodeProblem) -> FlowRule:
    proposal = problem.proposal
    if proposal.draft_law is not None and len(proposal.draft_laws) == 1:
        return ONE_DRAW_BESIDE if proposal.fixed_ids else ONE_DRAW
    return entry_for(type(proposal), RULE_OF)


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
        return self.flow.left(target_laws[self.node], self.scale)


class LayerPass:
    """The passes over a tree."""

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
        """The problems of the inner rule, at every node of the layer that has candidates."""
        scale = self._scale()
        return [self._scored.problem(node, scale) for node in self._parents()]

    def descend(self, flows: Sequence[Flow | Emission]) -> None:
        """Give the next layer its weights."""
        tree, scale, weights = self._scored.tree, self._scale(), dict[int, float]()
        from_above: list[NodeResidual] = []
        parents = self._parents()
        self._keep_leaves()
        for node, flow in zip(parents, flows, strict=True):
            part = self._weights[node] / scale
            for child in dict.fromkeys(tree.candidates[node]):
                weight = part * flow.accept_probs[tree.token_ids[child]]
                if weight > 0.0:
                    weights[child] = weight
            if isinstance(flow, Emission):
                from_above.append(NodeResidual(node=node, mass=part * flow.leftover, flow=flow))
            else:
                mass = max(0.0, self._weights[node] - part * flow.total)
                self._kept[-1].append(NodeResidual(node=node, mass=mass, scale=scale, flow=flow))
        self._weights, weight = weights, total_of(weights.values())
        self.expected_accepted += weight
        self._kept.append(from_above)
        self._free.append(max(0.0, 1.0 - weight - total_of(kept.mass for kept in from_above)))

    def ascend(self) -> Verdict:
        """Decide where to stop, and emit."""
        self._keep_leaves()
        draws, layer = self._scored.draws, len(self._kept) - 1
        first = next(index for index, kept in enumerate(self._kept) if kept)
        while layer > first and not (self._kept[layer] and draws.bernoulli(self._stop_prob(layer))):
            layer -= 1
        kept = self._kept[layer]
        masses = torch.tensor([node.mass for node in kept], dtype=torch.float64)
        rows = masses.nonzero().squeeze(-1)
        # Where nothing is kept the layer is never reached, but for rounding.
        row = (
            draws.categorical(SparseLaw(rows, masses[rows] / total_of(masses)))
            if rows.numel() > 1
            else int(masses.argmax())
        )
        token = draws.categorical(kept[row].law(self._scored.target_laws))
        return verdict_at(self._scored.tree, kept[row].node, token)

    def _stop_prob(self, layer: int) -> float:
        mass = total_of(kept.mass for kept in self._kept[layer])
        return mass / (mass + self._free[layer]) if mass > 0.0 else 0.0

    def _parents(self) -> list[int]:
        return [node for node in self._weights if self._scored.tree.candidates[node]]

    def _scale(self) -> float:
        # Above one by rounding only.
        return min(1.0, total_of(self._weights[node] for node in self._parents()))

    def _keep_leaves(self) -> None:
        leaves = [node for node in self._weights if not self._scored.tree.candidates[node]]
        self._kept[-1] += [NodeResidual(node=node, mass=self._weights[node]) for node in leaves]
