"""Plans within the limits of a request and the tokens that it still wants."""

import pytest

from monge.core.context import DraftPlan
from tests.engine.laws import session


@pytest.mark.parametrize(
    ("plan", "limits", "expected"),
    [
        (DraftPlan(max_depth=2, drafter="ngram"), DraftPlan(max_depth=2), None),
        (DraftPlan(), DraftPlan(max_nodes=4), DraftPlan(max_nodes=4)),
        (DraftPlan(max_depth=3), DraftPlan(max_depth=1), DraftPlan(max_depth=1)),
        (DraftPlan(max_nodes=9), DraftPlan(max_nodes=4), DraftPlan(max_nodes=4)),
    ],
)
def test_a_plan_is_cut_to_limits(plan, limits, expected):
    assert plan.within(limits) == (expected or plan)


@pytest.mark.parametrize(("depth", "expected"), [(None, 3), (9, 3), (3, 3), (2, 2), (0, 0)])
def test_nothing_is_drafted_beyond_the_tokens_that_are_wanted(depth, expected):
    """A round commits one token more than it accepts."""
    one = session(0, (1,), max_new_tokens=5, limits=DraftPlan(max_nodes=7))
    one.context = one.context.append((2,))
    assert one.limit(DraftPlan(max_depth=depth)) == DraftPlan(max_depth=expected, max_nodes=7)
