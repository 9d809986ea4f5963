"""Rules that try candidates one after another.

Many nodes at once, same noise, same token, and as many uniforms used.
"""

import numpy as np
import pytest
import torch

from monge.core.draws import RequestDraws, TapeDraws
from monge.core.errors import ProposalMismatchError
from monge.core.law import DenseLaw, Law, SparseLaw
from monge.core.proposal import Deterministic, Iid
from monge.core.tree import GrowingTree, TokenTree
from monge.verify import trial_rule
from monge.verify.base import NodeProblem, ScoredTree, Walk
from monge.verify.fast.trials import Outcome, Trials, emitted
from monge.verify.layer import FLOW_RULES
from monge.verify.trial_rule import TrialRule
from tests.verify.fast.batches import REGIMES, law_of, problems

RULES = {
    "rrs": ("iid", "mixed"),
    "rrs_without_replacement": ("without_replacement", "iid"),
    "k_seq": ("iid",),
    "naive_tree": ("iid",),
    "single_draft": ("one",),
    "greedy": ("mixed",),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("rule", "way"), [(rule, way) for rule, ways in RULES.items() for way in ways]
)
def test_same_noise_same_token(rule: str, way: str, regime: str) -> None:
    one = FLOW_RULES.parse(rule)
    assert isinstance(one, TrialRule)
    nodes = [
        (node, tape)
        for node, tape in problems(regime, way)
        if not isinstance(node.proposal, Deterministic)
    ]
    trials = [trial for node, _ in nodes if (trial := one.trial(node)) is not None]
    assert len(trials) == len(nodes)
    assert nodes or regime == "single token"
    expected = [
        one.emit(node.target_law, node.proposal, node.candidates, tape) for node, tape in nodes
    ]
    assert not nodes or emitted(trials, type(one).method) == expected
    # And nothing more is used.
    assert [node.draws.uniform() for node, _ in nodes] == [tape.uniform() for _, tape in nodes]


def test_nothing_is_left_of_the_target() -> None:
    """A position that rounding alone can reach: a draw is refused though p equals q.

    The token is then one of p.
    """
    p = SparseLaw(torch.tensor([1, 3]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    for law in (p, DenseLaw(torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64))):
        trial = NodeProblem(
            target_law=law, proposal=Iid(p), candidates=(1,), draws=TapeDraws([0.9, 0.9])
        )
        refuse = Outcome(winners=torch.tensor([-1]), left=torch.zeros(1, 2, dtype=torch.float64))
        assert emitted([trial], lambda _, refuse=refuse: refuse) == [3]


def test_a_draw_that_its_law_cannot_give() -> None:
    q = SparseLaw(torch.tensor([1, 3]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    for drawn in ((2,), (1, 4)):
        trial = NodeProblem(target_law=q, proposal=Iid(q), candidates=drawn, draws=TapeDraws([]))
        with pytest.raises(ProposalMismatchError, match="a candidate lies outside the support"):
            Trials.of([trial], [[0.5] * len(drawn)])


@pytest.mark.parametrize(("rule", "runs"), [("k_seq", True), ("rrs", False)])
def test_the_twin_decides_where_it_pays(
    rule: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    monkeypatch.setattr(
        trial_rule, "emitted", lambda *given: (ran.append(len(given[0])), emitted(*given))[1]
    )
    nodes = problems("rough", "iid")
    tokens = FLOW_RULES.parse(rule).emit_many([node for node, _ in nodes])
    assert ran == ([len(nodes)] if runs else [])
    assert tokens == [
        FLOW_RULES.parse(rule).emit(one.target_law, one.proposal, one.candidates, tape)
        for one, tape in nodes
    ]


def test_trees_of_many_requests() -> None:
    """A level of all trees at once: the verdicts of the trees alone, ragged, with a leaf at the root among them."""
    p, q = (law_of(np.arange(1.0, 9.0)[::order], is_dense=True) for order in (1, -1))
    scored = []
    for seed, widths in enumerate([(3, 2), (1, 1, 1, 1), (2, 2, 2), (1,), ()] * 3):
        tree = grown(widths, q, RequestDraws(seed + 100))
        scored.append((tree, [p] * tree.num_nodes, seed))
    walk = Walk(FLOW_RULES.parse("k_seq"))
    alone = [
        walk.verify(tree, target_laws, RequestDraws(seed)) for tree, target_laws, seed in scored
    ]
    together = walk.verify_many(
        [
            ScoredTree(tree=tree, target_laws=target_laws, draws=RequestDraws(seed))
            for tree, target_laws, seed in scored
        ]
    )
    assert list(together) == alone
    assert len({len(verdict.path) for verdict in alone}) > 1
    tree, target_laws, seed = scored[0]
    short = ScoredTree(tree=tree, target_laws=target_laws[1:], draws=RequestDraws(seed))
    message = f"the tree has {tree.num_nodes} nodes but {tree.num_nodes - 1} laws came"
    for verify in (
        lambda: walk.verify(short.tree, short.target_laws, short.draws),
        lambda: walk.verify_many([short]),
    ):
        with pytest.raises(ProposalMismatchError, match=message):
            verify()


def grown(widths: tuple[int, ...], q: Law, draws: RequestDraws) -> TokenTree:
    growing = GrowingTree(0)
    level = [0]
    for width in widths:
        level = [
            child
            for own in growing.grow_level(dict.fromkeys(level, Iid(q, width)), draws).values()
            for child in own
        ]
    return growing.finish()
