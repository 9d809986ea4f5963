"""Rules that try candidates one after another: many nodes at once, same noise, same token, and as many uniforms used."""

import numpy as np
import pytest
import torch

from monge.core.draws import TapeDraws
from monge.core.law import DenseLaw, Law, SparseLaw
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.verify import trial_rule
from monge.verify.flow_rules import FLOW_RULES
from monge.verify.problem import NodeProblem
from tests.verify.fast.test_twins import laws

VOCAB = 40
REGIMES = ("rough", "ties", "nearly equal", "equal", "peaked", "disjoint", "single token")
RULES = {
    "rrs": ("iid", "mixed"),
    "rrs_without_replacement": ("without_replacement", "iid"),
    "k_seq": ("iid",),
    "naive_tree": ("iid",),
    "single_draft": ("one",),
    "greedy": ("mixed",),
}


def law_of(masses: np.ndarray, is_dense: bool) -> Law:
    probs = torch.zeros(VOCAB, dtype=torch.float64)
    probs[: masses.size] = torch.from_numpy(masses / masses.sum())
    return DenseLaw(probs / probs.sum()) if is_dense else DenseLaw(probs).sparse()


def proposal_of(way: str, q: Law, width: int) -> Proposal:
    if way == "mixed":
        heavy = q.top(min(2, width))
        rest = q
        for token in heavy:
            left = rest.without(token)
            if left is None:
                return Deterministic(heavy)
            rest = left
        return Mixed(heavy, rest, width)
    return WithoutReplacement(q, width) if way == "without_replacement" else Iid(q, 1 if way == "one" else width)


def problems(regime: str, way: str) -> list[tuple[NodeProblem, TapeDraws]]:
    """Nodes of all widths and supports, dense and sparse; each with its tape and another copy of it."""
    found = []
    for seed in range(24):
        p, q = laws(regime, seed)
        rng = np.random.default_rng(seed)
        proposal = proposal_of(way, law_of(q, seed % 2 == 0), 1 + seed % 5)
        offers = proposal.draw(TapeDraws(rng.random(12).tolist()))
        tape = rng.random(30).tolist()
        draws = TapeDraws(tape)
        problem = NodeProblem(target_law=law_of(p, seed % 3 > 0), proposal=proposal, offers=offers, draws=draws)
        found.append((problem, TapeDraws(tape)))
    return found


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("rule", "way"), [(rule, way) for rule, ways in RULES.items() for way in ways])
def test_same_noise_same_token(rule: str, way: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = FLOW_RULES.parse(rule)
    nodes = problems(regime, way)
    expected = [one.emit(node.target_law, node.proposal, node.offers, tape) for node, tape in nodes]
    ran = []
    twin = trial_rule.emitted
    monkeypatch.setattr(trial_rule, "emitted", lambda *given: (ran.append(len(given[0])), twin(*given))[1])
    assert one.emit_many([node for node, _ in nodes]) == expected
    assert ran or regime == "single token"
    assert [node.draws.uniform() for node, _ in nodes] == [tape.uniform() for _, tape in nodes]  # and nothing more is used


def test_nothing_is_left_of_the_target() -> None:
    """A position that rounding alone can reach: a draw is refused though p equals q. The token is then one of p."""
    p = SparseLaw(torch.tensor([1, 3]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    dense = DenseLaw(torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64))
    for law in (p, dense):
        found = trial_rule.emitted(
            [trial_rule.Trial(target_law=law, draft_law=p, drawn=(1,), draws=TapeDraws([0.9, 0.9]))], _refuse
        )
        assert found == [3]


def _refuse(trials: object) -> object:
    from monge.verify.fast.trials import Outcome, Trials

    assert isinstance(trials, Trials)
    return Outcome(winners=torch.tensor([-1]), left=torch.zeros_like(trials.p))
