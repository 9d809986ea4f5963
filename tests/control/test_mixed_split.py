"""The controller that splits candidates into top tokens and draws.

What it learns, and that it leaves the law alone.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from monge.api import make_components
from monge.control.base import RoundInfo, SharedState
from monge.control.latency import Latency
from monge.control.mixed_split import MixedSplit
from monge.control.registry import CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.draws import TapeDraws
from monge.core.errors import OptionError
from monge.core.law import DenseLaw
from monge.core.proposal import Iid, Mixed
from monge.core.splits import splits_along
from monge.core.tree import GrowingTree
from monge.draft.tree.children import children_of
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from tests.control.scripts import chain_round, plan_one

LAW = DenseLaw(torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05], dtype=torch.float64))
TREES = ("fixed_width((2,), 'mixed')", "fixed_width((2,), 'greedy_plus_one')")


def models() -> tuple[TabularModel, TabularModel]:
    return TabularModel(RandomTable(3, 11), 3), TabularModel(RandomTable(3, 23), 3)


@pytest.mark.parametrize("way", ["mixed", "mixed(2)", "greedy_plus_one"])
def test_ways_that_follow_a_plan(way: str) -> None:
    for width in (1, 2, 3, 4):
        proposal = children_of(way, LAW, width, DraftPlan(num_fixed=(0, 0, 2)))
        assert isinstance(proposal, Mixed)
        assert (proposal.fixed, proposal.width) == (
            ((1, 2), width - 2) if width > 2 else ((), width)
        )
    assert isinstance(children_of("iid", LAW, 3, DraftPlan(num_fixed=(0, 1, 2))), Iid)


def test_without_a_plan_a_tree_decides() -> None:
    fixed = {
        way: children_of(way, LAW, 4).draw(TapeDraws([0.0] * 4))[:3]
        for way in ("mixed(0)", "mixed", "mixed(3)")
    }
    assert fixed == {"mixed(0)": (0, 0, 0), "mixed": (1, 0, 0), "mixed(3)": (1, 2, 3)}


@pytest.mark.parametrize("num_fixed", [(1,), (0, 2), (-1,)])
def test_splits_that_cannot_be(num_fixed: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="at most 0, 1, ... can be fixed"):
        DraftPlan(num_fixed=num_fixed)


def test_what_a_record_says() -> None:
    tree = GrowingTree(0)
    (first, *_) = tree.grow(0, children_of("mixed(2)", LAW, 3), TapeDraws([0.0]))
    (second, *_) = tree.grow(
        first,
        children_of("mixed", DenseLaw(torch.tensor([0, 0.5, 0.5], dtype=torch.float64)), 2),
        TapeDraws([0.0]),
    )
    tree.grow(second, Iid(LAW, 1), TapeDraws([0.0]))
    finished = tree.finish()
    assert splits_along(finished, ()) == ((3, 2),)
    # A law of two tokens leaves no choice to a node of two candidates, and an independent draw was
    # no choice.
    assert splits_along(finished, (first, second)) == ((3, 2), (0, 0), (0, 0))


def chosen(
    controller: MixedSplit, shared: SharedState, chances: tuple[float, ...], rounds: int, seed: int
) -> list[int]:
    """The splits of a node of width `len(chances)`, whose candidates are accepted with the chance of the split."""
    rng, state, found = np.random.default_rng(seed), controller.init(shared), []
    for _ in range(rounds):
        plan = plan_one(controller, state, TapeDraws([]))
        num_fixed = plan.fixed(0, len(chances))
        is_accepted = bool(rng.random() < chances[num_fixed])
        record = chain_round(1, int(is_accepted), plan=plan, splits=((len(chances), num_fixed),))
        state = controller.update(state, record)
        found.append(num_fixed)
    return found


def test_it_finds_the_best_split_and_follows_a_change() -> None:
    controller, shared = MixedSplit(), SharedState()
    first = chosen(controller, shared, (0.5, 0.8, 0.6, 0.4), 1000, 1)
    assert set(first) == {0, 1, 2, 3}
    assert first[500:].count(1) > 450
    second = chosen(controller, shared, (0.5, 0.4, 0.6, 0.95), 1500, 2)
    assert second[1000:].count(3) > 450


def test_a_request_may_differ_from_the_others() -> None:
    controller, shared = MixedSplit(), SharedState()
    chosen(controller, shared, (0.8, 0.6), 400, 1)
    assert chosen(controller, shared, (0.5, 1.0), 300, 2)[200:].count(1) > 90


def test_nodes_that_had_no_choice_teach_nothing() -> None:
    controller = MixedSplit()
    state = controller.init(SharedState())
    after = controller.update(state, chain_round(2, 1, splits=((0, 0), (1, 0))))
    assert (after.counts, after.shared.notes) == ({}, {"mixed_split": {}})


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        (rule, TREES[0])
        for rule in ("rrs", "optimal(given='candidates')", "layer('rrs')", "traversal")
    ]
    + [("greedy", TREES[1])],
)
def test_the_law_is_the_targets(verifier: str, tree: str) -> None:
    """Two rounds, with arms that swing after every node."""

    def components() -> Any:
        return make_components(
            *models(), controller="mixed_split(explore=4)", tree=tree, verifier=verifier
        )

    case = Case(horizon=2, max_new_tokens=3)
    assert law_error(output_law(components, case), target_law(models()[0], case)) < 1e-12


def test_it_plans_with_any_window_controller() -> None:
    controller = CONTROLLERS.parse("mixed_split('confidence_threshold(threshold=0.3)')")
    assert controller.reads == {"accepted", "notes", "confidence"}
    plan = plan_one(controller, controller.init(SharedState()), TapeDraws([]))
    assert plan.stop is not None
    assert len(plan.num_fixed) == 8


def test_a_batch_is_planned_as_its_window_controller_plans_it() -> None:
    """`survival_budget` shares six slots among three requests.

    Planned one by one, each would get six.
    """
    shared = SharedState(Latency.linear(plain=1.0, node=0.01, draft=0.01))
    for text in ("survival_budget(max_slots=6)", "goodput"):
        inner, outer = CONTROLLERS.parse(text), CONTROLLERS.parse(f"mixed_split({text!r})")
        info = RoundInfo(context_lengths=(1, 1, 1), batch_size=3)
        expected = inner.plan([inner.init(shared) for _ in range(3)], info, [TapeDraws([])] * 3)
        shared.notes.clear()
        planned = outer.plan([outer.init(shared) for _ in range(3)], info, [TapeDraws([])] * 3)
        assert [replace(plan, num_fixed=()) for plan in planned] == list(expected)
        assert all(len(plan.num_fixed) == 8 for plan in planned)


@pytest.mark.parametrize(
    "tree", ["chain(3)", "fixed_width((2, 1), 'iid')", "best_first(3, 2, 2, 2)"]
)
def test_trees_without_a_choice_are_refused(tree: str) -> None:
    with pytest.raises(
        OptionError, match="MixedSplit chooses how many candidates of a node are its top tokens"
    ):
        make_components(*models(), controller="mixed_split", tree=tree)


@pytest.mark.parametrize(
    "options", ["max_width=0", "explore=-1", "keep=0", "keep=2", "explore=float('nan')", "'hedge'"]
)
def test_settings_that_cannot_be(options: str) -> None:
    with pytest.raises(OptionError):
        CONTROLLERS.parse(f"mixed_split({options})")
