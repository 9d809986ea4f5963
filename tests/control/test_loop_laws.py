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
from monge.core.draws import Draws
from monge.core.proposal import Iid, WithoutReplacement
from monge.core.verdict import StepRecord
from monge.draft.tree.registry import TREES
from monge.engine.components import Components
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS

VOCAB = 3
TREE_TEXTS = (
    *(
        "chain(2)",
        "chain(2, 'top')",
        "fixed_width((2, 1), 'iid')",
        "fixed_width((2, 1), 'without_replacement')",
    ),
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
    "confidence_threshold": ("confidence_threshold(threshold=0.45)",),
    "goodput": ("goodput(first_cooldown=1, probe=1)",),
}


@dataclass(frozen=True, slots=True)
class Adaptive(SoloController[tuple[int, float]]):
    """Plans that swing as far as the last round allows: deeper after acceptance."""

    min_token_prob: float

    reads = frozenset({"accepted", "confidence"})

    def init(self, shared: SharedState) -> tuple[int, float]:
        return 2, 0.0

    def plan_one(
        self, state: tuple[int, float], info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        return DraftPlan(max_depth=state[0], min_token_prob=self.min_token_prob)

    def update(self, state: tuple[int, float], record: StepRecord) -> tuple[int, float]:
        return (2 if record.num_accepted else 1), sum(record.token_probs)


THRESHOLDS = (0.25, 0.35, 0.45)


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


def stopping_combinations() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for tree in TREE_TEXTS:
        limits = TREES.parse(tree).limits
        for name in VERIFIERS:
            rule = VERIFIERS.make(name)
            if (
                rule.is_enumerable
                and unsupported_reason(rule, limits.proposes, limits.max_width) is None
            ):
                found.append((tree, name))
    return found


@pytest.mark.parametrize(
    ("tree", "verifier"), [pair for pair in stopping_combinations() if pair[0] == "chain(2)"]
)
def test_a_threshold_with_every_verifier(tree: str, verifier: str) -> None:
    """The first token of a round whose draft is stopped; wider trees follow in the slow tests."""
    case = Case(horizon=1, max_new_tokens=3)
    assert error(case, controller=Adaptive(0.35), tree=tree, verifier=verifier) < 1e-12


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_paths_that_end_after_an_improbable_token(threshold: float) -> None:
    case = Case(horizon=2, max_new_tokens=3)
    assert (
        error(case, controller=Adaptive(threshold), tree="paths(2, 2)", verifier="multipath_block")
        < 1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize(("tree", "verifier"), stopping_combinations())
def test_every_threshold_with_every_verifier(tree: str, verifier: str, threshold: float) -> None:
    case = Case(horizon=1 if TREES.parse(tree).limits.max_width > 1 else 2, max_new_tokens=3)
    assert error(case, controller=Adaptive(threshold), tree=tree, verifier=verifier) < 1e-12


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_the_thresholds_do_stop(threshold: float) -> None:
    """The thresholds of the test above end some drafts early, and let some go on."""
    depths = set[int]()

    @dataclass(frozen=True, slots=True)
    class Watching(Adaptive):
        def update(self, state: tuple[int, float], record: StepRecord) -> tuple[int, float]:
            if record.plan.max_depth == 2:
                depths.add(record.depth)
            return 2, 0.0

    for token in range(VOCAB):
        case = Case(prompt=(token,), horizon=1, max_new_tokens=3)
        output_law(lambda: components(controller=Watching(threshold), tree="chain(2)"), case)
    assert len(depths) > 1


def test_combinations_cover_sampled_trees() -> None:
    proposals = {
        kind for tree, _ in stopping_combinations() for kind in TREES.parse(tree).limits.proposes
    }
    assert {Iid, WithoutReplacement} <= proposals
