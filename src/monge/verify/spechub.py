"""SpecHub: pairs of candidates that share a hub."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law, SparseLaw
from monge.core.lazy_laws import below
from monge.core.proposal import Deterministic, HubPairs, Proposal
from monge.verify.flow import Flow, FlowRule, walked
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True)
class SpecHub(FlowRule):
    """Test the other token of a hub pair first, then the hub, which takes what the other tokens leave.

    Law:
        The emitted token follows p for pairs that contain the most probable token of q
        (`HubPairs`), and for deterministic candidates, which are left to the target walk.

    Rule:
        With hub a, `Q(i, a) = q_i` and `Q(a, i) = q_a q_i / (1 - q_a)` for i != a, and P = p:
        1. (i, a) accepts i with probability `min(1, P_i / Q(i, a))`; `r_i = (Q(i, a) - P_i)_+`,
           `P_i = (P_i - Q(i, a))_+`.
        2. (a, i) accepts i with probability `min(1, P_i / Q(a, i))`; `s_i = (Q(a, i) - P_i)_+`,
           `P_i = (P_i - Q(a, i))_+`.
        3. (a, i), undecided, accepts a with probability `min(1, P_a / sum s)`; `P_a = (P_a - sum
           s)_+`.
        4. (i, a), undecided, accepts a with probability `min(1, P_a / sum r)`; `P_a = (P_a - sum
           r)_+`.
        5. Undecided: emit y proportional to P. P changes for all i and whatever pair was drawn.
           Acceptance is the optimum for these pairs, and the same as that of `greedy` with two
           candidates: the pair is the hub and one draw from the rest of q either way.

    Cost:
        O(support of q) a node; O(vocab) when neither is accepted.

    Reference:
        SpecHub (Sun et al., arXiv 2411.05289). The released code accepts the hub where p_a > 1 -
        1e-3; that is not exact, and is left out.
    """

    accepts = frozenset[type[Proposal]]({HubPairs, Deterministic})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        p = target_law
        if not isinstance(proposal, HubPairs) or len(candidates) == 1:
            return draws.categorical(p)  # no draw to couple with: the target walk is optimal
        tests = _Tests.of_node(p, 1.0, proposal)
        token, accept, accept_hub = tests.of(candidates)
        if draws.bernoulli(accept):
            return token
        if draws.bernoulli(accept_hub):
            return proposal.hub
        return draws.categorical(below(p, *tests.accepted()))

    def flow(self, problem: NodeProblem) -> Flow:
        p, scale, proposal = problem.target_law, problem.scale, problem.proposal
        if not isinstance(proposal, HubPairs) or len(problem.candidates) == 1:
            return walked(problem)
        tests = _Tests.of_node(p, scale, proposal)
        token, accept, accept_hub = tests.of(problem.candidates)
        token_ids, masses = tests.accepted()
        return Flow(
            accept_probs={token: accept, proposal.hub: (1.0 - accept) * accept_hub},
            token_ids=token_ids,
            masses=masses,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tests:
    """The four tests of one node.

    Args:
        hub: The hub.
        rest: q without the hub.
        pairs: Q(i, a) and Q(a, i) for i in the support of the rest.
        taken: Masses that tests 1 and 2 take of every such i.
        hub_taken: Masses that tests 4 and 3 take of the hub, `sum r` and `sum s` at most.
    """

    hub: int
    rest: SparseLaw
    pairs: tuple[Float64[Tensor, " support"], Float64[Tensor, " support"]]
    taken: tuple[Float64[Tensor, " support"], Float64[Tensor, " support"]]
    hub_taken: tuple[float, float]

    @classmethod
    def of_node(cls, p: Law, scale: float, proposal: HubPairs) -> "_Tests":
        hub, q = proposal.hub, proposal.law
        others = q.without(hub)
        assert others is not None, "a point mass has one candidate"
        rest = others.sparse()
        first = q.at(rest.token_ids)
        second = q.prob(hub) * rest.probs
        left = scale * p.at(rest.token_ids)
        taken = left.minimum(first)
        taken_later = (left - taken).minimum(second)
        left_of_hub = scale * p.prob(hub)
        hub_second = min(left_of_hub, float((second - taken_later).sum()))
        hub_first = min(left_of_hub - hub_second, float((first - taken).sum()))
        return cls(
            hub=hub,
            rest=rest,
            pairs=(first, second),
            taken=(taken, taken_later),
            hub_taken=(hub_first, hub_second),
        )

    def of(self, candidates: Sequence[int]) -> tuple[int, float, float]:
        """The other token of a pair, its acceptance, and the hub's where the other is refused."""
        hub_first = candidates[0] == self.hub
        token = candidates[1] if hub_first else candidates[0]
        i = int(torch.searchsorted(self.rest.token_ids, token))
        drawn, taken = self.pairs[hub_first], self.taken[hub_first]
        refused = float((drawn - taken).sum())
        # Where nothing is refused the hub is not tested.
        accept_hub = self.hub_taken[hub_first] / refused if refused > 0.0 else 0.0
        return token, float(taken[i] / drawn[i]), accept_hub

    def accepted(self) -> tuple[Int64[Tensor, " tokens"], Float64[Tensor, " tokens"]]:
        """Increasing token ids, the hub among them, and the mass accepted of each."""
        hub_mass = self.taken[0].new_tensor([sum(self.hub_taken)])
        taken, ids, hub = (
            self.taken[0] + self.taken[1],
            self.rest.token_ids,
            self.rest.token_ids.new_tensor([self.hub]),
        )
        place = int(torch.searchsorted(ids, self.hub))
        return torch.cat([ids[:place], hub, ids[place:]]), torch.cat(
            [taken[:place], hub_mass, taken[place:]]
        )
