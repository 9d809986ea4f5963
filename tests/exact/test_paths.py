"""Independent paths as one tree with multiplicities, in the real loop."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.api import make_components
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.draft.tree.paths import Paths
from monge.laws.draws import SeededDraws, TapeDraws
from monge.laws.proposal import Iid, PathDraws
from monge.laws.tree import GrowingTree
from monge.oracle.decoding import Case
from monge.oracle.tabular import TabularModel
from tests.kit.strategies import dense_law
from tests.kit.tables import loop_error, table

VOCAB = 2


def models() -> list[TabularModel]:
    return [table(5, VOCAB), table(17, VOCAB)]


error = partial(loop_error, models)


@pytest.mark.parametrize(
    "verifier", ["recursive_rejection", "k_seq", "traversal", "multipath_block"]
)
def test_paths_beyond_the_horizon(verifier: str) -> None:
    """Two levels are verified in one round.

    A node that both paths reach with two draws, another with one.
    """
    assert error(Case(horizon=2, max_new_tokens=3), tree="paths(2, 2)", verifier=verifier) < 1e-12


@pytest.mark.parametrize(
    "controller", ["fixed(max_nodes=3)", "fixed(max_depth=1)", "fixed(max_nodes=1)"]
)
def test_paths_under_a_plan(controller: str) -> None:
    case = Case(horizon=1, max_new_tokens=3)
    for verifier in ("recursive_rejection", "multipath_block"):
        assert error(case, tree="paths(2, 2)", verifier=verifier, controller=controller) < 1e-12


def test_paths_are_promised_where_the_plan_ends_none() -> None:
    for plan, kind in (
        (DraftPlan(), PathDraws),
        (DraftPlan(max_nodes=5), Iid),
        (DraftPlan(max_nodes=3, max_depth=1), PathDraws),
    ):
        tree, law = GrowingTree(0), dense_law([2, 3, 5])
        Paths(3, 2).expand(tree, (0,), (law,), plan, TapeDraws([0.3, 0.3, 0.9]))
        assert type(tree.finish().proposals[0]) is kind


def test_a_node_draws_once_for_every_path_that_reaches_it() -> None:
    """Tokens 1, 1, 2 at the root: two paths go on below the first node, one below the second."""
    builder, tree, law = Paths(3, 2), GrowingTree(0), dense_law([2, 3, 5])
    grown = builder.expand(tree, (0,), (law,), DraftPlan(), TapeDraws([0.3, 0.3, 0.9]))
    assert [tree.multiplicity(node) for node in grown] == [2, 1]
    assert builder.expand(tree, grown, (law, law), DraftPlan(), TapeDraws([0.1, 0.9, 0.3])) == ()
    finished = builder.finish(tree, DraftPlan())
    widths = [proposal.width for proposal in finished.proposals if isinstance(proposal, Iid)]
    assert widths == [3, 2, 1]
    assert finished.candidates[:3] == ((1, 1, 2), (3, 4), (5,))
    assert finished.num_nodes - 1 <= builder.limits.max_nodes == 6


@given(seed=st.integers(0, 99), max_nodes=st.integers(1, 8), max_depth=st.integers(1, 4))
def test_paths_stay_within_the_plan(seed: int, max_nodes: int, max_depth: int) -> None:
    builder, tree, law = Paths(3, 3), GrowingTree(0), dense_law([2, 3, 5, 1])
    plan, draws = DraftPlan(max_nodes=max_nodes, max_depth=max_depth), SeededDraws(seed)
    frontier: Sequence[int] = (0,)
    while frontier:
        frontier = builder.expand(tree, frontier, [law] * len(frontier), plan, draws)
    finished = builder.finish(tree, plan)
    assert finished.num_nodes - 1 <= max_nodes
    assert max(finished.depths) <= min(3, max_depth)


@pytest.mark.parametrize(("tree", "name"), [("paths(0, 2)", "num_paths"), ("paths(2, 0)", "depth")])
def test_bad_sizes_of_paths_are_refused(tree: str, name: str) -> None:
    with pytest.raises(OptionError, match=f"paths: {name} must be at least 1; got 0"):
        make_components(*models(), tree=tree)
