"""Every controller in the real loop, every draw enumerated.

The text has the target's law, whatever was planned.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from monge.api import make_components
from monge.control.base import RoundInfo, SharedState, SoloController
from monge.control.latency import Latency
from monge.control.registry import DEPTH_CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord
from monge.draft.tree.registry import TREES
from monge.engine.components import Components
from monge.laws.draws import Draws
from monge.laws.proposal import Iid, WithoutReplacement
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.verify.base import why_no_exactness
from monge.verify.registry import VERIFIERS

VOCAB = 3
TREE_TEXTS = (
    *("chain(2)", "chain(2, 'top')", "fixed_width((2, 1), 'iid')", "fixed_width((2, 1))"),
    "paths(2, 2)",
)
SETTINGS = {
    "on_the_fly": (
        "on_the_fly(probe_prob=0.5, prior=(0, 1))",
        "on_the_fly(history=1, prior=(1, 0))",
    ),
    "fsm": ("fsm(first=2)",),
    "cached_fsm": ("cached_fsm(machine=(2, 1, 1, 1, 2), max_ending=1, min_ending=1)",),
    "q_learning": ("q_learning(windows=(0, 2))",),
    "goodput": ("goodput(first_cooldown=1, probe=1)",),
}


@dataclass(frozen=True, slots=True)
class Adaptive(SoloController[int]):
    """Plans that swing as far as the last round allows: deeper after acceptance."""

    reads = frozenset({"accepted"})

    def init(self, shared: SharedState) -> int:
        return 2

    def plan_one(self, state: int, info: RoundInfo, context_length: int, draws: Draws) -> DraftPlan:
        return DraftPlan(max_depth=state)

    def update(self, state: int, record: StepRecord) -> int:
        return 2 if record.num_accepted else 1


def models(seed: int = 11) -> tuple[TabularModel, TabularModel]:
    return TabularModel(RandomTable(VOCAB, seed), VOCAB), TabularModel(
        RandomTable(VOCAB, seed + 12), VOCAB
    )


def components(**settings: Any) -> Components:
    costs = Latency.linear(plain=1.0, node=0.1, draft=0.2)
    return make_components(*models(), latency=costs, **settings)


def error(case: Case, **settings: Any) -> float:
    return law_error(
        output_law(lambda: components(**settings), case), target_law(models()[0], case)
    )


@pytest.mark.parametrize(
    "text", [text for name in DEPTH_CONTROLLERS for text in SETTINGS.get(name, (name,))]
)
@pytest.mark.parametrize(
    ("tree", "horizon"),
    [
        ("chain(2)", 2),
        pytest.param("chain(2)", 3, marks=pytest.mark.slow),
        pytest.param("best_first(3, 2, 2, 2)", 3, marks=pytest.mark.slow),
    ],
)
def test_every_controller(text: str, tree: str, horizon: int) -> None:
    """Over two rounds at least, the second planned from what the first accepted."""
    assert error(Case(horizon=horizon, max_new_tokens=3), controller=text, tree=tree) < 1e-12


def combinations() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for tree in TREE_TEXTS:
        limits = TREES.parse(tree).limits
        for name in VERIFIERS:
            rule = VERIFIERS.make(name)
            if (
                rule.is_enumerable
                and why_no_exactness(rule, limits.proposes, limits.max_width) is None
            ):
                found.append((tree, name))
    return found


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        pytest.param(*pair, marks=() if pair[0] == "chain(2)" else pytest.mark.slow)
        for pair in combinations()
    ],
)
def test_a_plan_that_follows_acceptance_with_every_verifier(tree: str, verifier: str) -> None:
    case = Case(horizon=1 if TREES.parse(tree).limits.max_width > 1 else 2, max_new_tokens=3)
    assert error(case, controller=Adaptive(), tree=tree, verifier=verifier) < 1e-12


def test_combinations_cover_sampled_trees() -> None:
    proposals = {kind for tree, _ in combinations() for kind in TREES.parse(tree).limits.proposes}
    assert {Iid, WithoutReplacement} <= proposals
