"""Layer Verification: any coupling of one node, lifted to whole trees layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from monge.core.draws import Draws
from monge.core.errors import RequestError
from monge.core.law import LawSequence
from monge.core.proposal import (
    Deterministic,
    HubPairs,
    Iid,
    Independent,
    Mixed,
    Proposal,
    WithoutReplacement,
    entry_for,
)
from monge.core.registry import Registry
from monge.core.systematic import Systematic
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.verify.base import NodeProblem, ScoredTree, Verifier
from monge.verify.canonical import Canonical
from monge.verify.flow import Emission, Flow, FlowRule
from monge.verify.greedy import Greedy
from monge.verify.k_seq import KSeq
from monge.verify.layer_pass import LayerPass
from monge.verify.naive_tree import NaiveTree
from monge.verify.optimal import Optimal
from monge.verify.rrs import Rrs
from monge.verify.rrs_without_replacement import RrsWithoutReplacement
from monge.verify.single_draft import SingleDraft
from monge.verify.spechub import SpecHub
from monge.verify.systematic import EarliestDeadline
from monge.verify.target_walk import TargetWalk
from monge.verify.whole_tree import decided_part, walk_on

FLOW_RULES: Final[Registry[FlowRule]] = Registry(
    "node rule",
    {
        "target_walk": TargetWalk,
        "single_draft": SingleDraft,
        "rrs": Rrs,
        "rrs_without_replacement": RrsWithoutReplacement,
        "naive_tree": NaiveTree,
        "k_seq": KSeq,
        "greedy": Greedy,
        "canonical": Canonical,
        "spechub": SpecHub,
        "systematic": EarliestDeadline,
        "optimal": Optimal,
    },
)
"""The node rules that can be lifted to whole trees, by name."""

RULE_OF: Final[Mapping[type[Proposal], FlowRule]] = {
    Deterministic: TargetWalk(),
    Iid: Optimal(),
    Mixed: Optimal(),
    WithoutReplacement: RrsWithoutReplacement(),
    HubPairs: SpecHub(),
    Systematic: EarliestDeadline(),
    Independent: Canonical(),
}
"""Default rule of every way of drawing, and of its subclasses: the optimal one, if there is one."""

ONE_DRAW: Final = SingleDraft()
"""Optimal for a single draw, with nothing to sort and no positions to draw."""

ONE_DRAW_BESIDE: Final = Greedy()
"""Optimal for a single draw beside deterministic candidates."""


@dataclass(frozen=True, slots=True)
class Layer(Verifier):
    """Weigh all paths of the tree from the root down with a coupling of one node, then decide from the deepest layer up.

    Law:
        The accepted path, the token after it, and the target's own continuation together follow the
        target's law, for every way of drawing that the inner rule accepts. Which nodes of a level
        have candidates, and how these are drawn, may depend on earlier levels only, as
        `GrowingTree` makes sure; the scale s is then known before they are drawn. Below a node with
        candidates of `Arbitrary` origin the target walk decides.

    Rule:
        Down: the root has w = 1. In each layer let s be the sum of w over the nodes with
        candidates. At such a node v the inner rule couples its candidates with s p: it accepts x
        with probability pi(x | candidates), and with mass `y(x) = E[pi] <= s p(x)` on average. The
        child of x gets `(w_v / s) pi(x)`, and v keeps `R_v = w_v p - (w_v / s) y`. A node without
        candidates keeps `R_v = w_v p`. Where y has no closed form, what the inner rule emits beside
        the candidates, `(w_v / s) e(. | candidates)`, is kept in the layer of the children instead.
        Up: in each layer let r be the sum of all |R|, and f one minus the sum of all w and of what
        is kept from above. With probability `r / (r + f)` stop here: pick R with probability |R| /
        r, emit `y ~ R`. The first layer always stops. The expected number of accepted tokens is the
        expected sum of all w: in the first layer the inner rule's own acceptance; deeper, a smaller
        s lets it accept a larger part of s p than node by node.

    Cost:
        One flow for every node with candidates and w > 0; the target's laws at the other nodes are
        not looked at, except at the one that is stopped at. All requests of a round are weighed
        together, a layer at a time.

    Reference:
        Layer Verification (Cha, Cho, Yun, AdaptFM workshop at ICML 2026), from its abstract: the
        form here is re-derived, the proof our own. For one candidate a node it is Block
        Verification (Sun et al., arXiv 2403.10444); with one greedy draw, our reading of UniVer
        (arXiv 2605.04543).

    Args:
        inner: A node rule, or its name with settings; `None` takes the best known one for the way
            each node was drawn.
    """

    inner: FlowRule | str | None = None
    accepts: frozenset[type[Proposal]] = field(init=False, repr=False, compare=False)
    max_width: int | None = field(init=False, repr=False, compare=False)
    is_lossless: bool = field(init=False, repr=False, compare=False)
    is_enumerable: bool = field(init=False, repr=False, compare=False)
    _rules: tuple[FlowRule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rule = FLOW_RULES.parse(self.inner) if isinstance(self.inner, str) else self.inner
        rules = (
            tuple(dict.fromkeys((ONE_DRAW, ONE_DRAW_BESIDE, *RULE_OF.values())))
            if rule is None
            else (rule,)
        )
        derived = {
            "_rules": rules,
            "accepts": frozenset(RULE_OF) if rule is None else rule.accepts,
            "max_width": None if rule is None else rule.max_width,
            "is_lossless": all(one.is_lossless for one in rules),
            "is_enumerable": all(one.is_enumerable for one in rules),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def title(self) -> str:
        return "Layer" if self.inner is None else f"Layer({type(self._rules[0]).__name__})"

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        (outcome,) = self.verify_many([ScoredTree(tree=tree, target_laws=target_laws, draws=draws)])
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def verify_many(self, scored: Sequence[ScoredTree]) -> Sequence[Verdict | RequestError]:
        outcomes: dict[int, Verdict | RequestError] = {}
        passes = {
            row: LayerPass(replace(one, tree=decided_part(self, one.tree, one.target_laws)))
            for row, one in enumerate(scored)
        }
        while open_rows := [row for row in passes if row not in outcomes and passes[row].is_open]:
            problems: dict[int, Sequence[NodeProblem]] = {}
            for row in open_rows:
                try:
                    problems[row] = passes[row].problems()
                except RequestError as error:
                    outcomes[row] = error
            flows = iter(self.flows([problem for part in problems.values() for problem in part]))
            for row, part in problems.items():
                passes[row].descend([next(flows) for _ in part])
        for row, layers in passes.items():
            if row not in outcomes:
                try:
                    outcomes[row] = walk_on(scored[row], layers.ascend())
                except RequestError as error:
                    outcomes[row] = error
        return [outcomes[row] for row in range(len(scored))]

    def flows(self, problems: Sequence[NodeProblem]) -> Sequence[Flow | Emission]:
        """The flows of one layer, one call a rule, in the table's order.

        A request's draws do not depend on the others.
        """
        if self.inner is not None:
            return self._rules[0].flows(problems)
        flows: dict[int, Flow | Emission] = {}
        for rule in self._rules:
            rows = [row for row, problem in enumerate(problems) if _best_rule(problem) == rule]
            if rows:
                flows |= zip(rows, rule.flows([problems[row] for row in rows]), strict=True)
        return [flows[row] for row in range(len(problems))]


def _best_rule(problem: NodeProblem) -> FlowRule:
    proposal = problem.proposal
    if isinstance(proposal, Iid) and proposal.width == 1:
        return ONE_DRAW
    if isinstance(proposal, Mixed) and proposal.width == 1:
        return ONE_DRAW_BESIDE
    return entry_for(type(proposal), RULE_OF)
