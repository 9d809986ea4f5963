"""Plans within the limits of a request and the tokens that it still wants."""

import pytest

from monge.core.context import DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.engine.session import Request, Session


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
    limits = DraftPlan(max_nodes=7)
    request = Request(
        prompt_ids=(1,), max_new_tokens=5, rules=SamplingRules(), seed=0, limits=limits
    )
    session = Session(request, 0)
    session.context = session.context.append((2,))
    assert session.limit(DraftPlan(max_depth=depth)) == DraftPlan(max_depth=expected, max_nodes=7)
