"""What finished rounds teach the table of costs, told one by one or together."""

from dataclasses import replace

import pytest

from monge.api import make_parts
from monge.control.base import PLAIN
from monge.control.cost_model import CostModel
from monge.core.context import DraftPlan
from monge.core.verdict import StageTimes, StepRecord
from monge.engine.cost_learning import learn_all_costs
from monge.engine.parts import Parts
from monge.testing.tabular import RandomTable, TabularModel

RECORD = StepRecord(plan=PLAIN, num_nodes=0, depth=0, num_accepted=0, examined=(), next_kind="bonus", token_ids=(0,))


def parts_that_noted() -> tuple[Parts, list[str]]:
    """Parts of a settled table, and what it is asked, in order."""
    asked, costs = list[str](), CostModel.linear(plain=0.002, node=0.0001, draft=0.001, learns=True)
    parts = make_parts(*(TabularModel(RandomTable(5, seed), 5) for seed in (1, 2)), controller="price", costs=costs)
    learn_all_costs([rounds(*[0.1] * 100)], 3, parts)

    for name in ("is_due", "pass_over", "observe"):
        known = getattr(costs, name)
        setattr(costs, name, lambda *given, name=name, known=known: (asked.append(name), known(*given))[1])
    return parts, asked


def rounds(*seconds: float, depth: int = 0) -> list[StepRecord]:
    """Plain rounds, or those that drafted."""
    plan = DraftPlan(max_depth=depth)
    times = [StageTimes(total_s=one) for one in seconds]
    return [replace(RECORD, plan=plan, depth=depth, num_nodes=depth, times=one, context_length=20) for one in times]


def test_of_a_rest_that_is_told_of_together_the_last_round_may_teach() -> None:
    parts, asked = parts_that_noted()
    costs = parts.memory.costs
    assert costs is not None
    before, num_rounds = costs.verify_s(0, 1, 20), costs.num_rounds
    learn_all_costs([rounds(*[0.002] * 15, 0.5)], 103, parts)
    assert asked == ["pass_over", "is_due", "observe"]
    assert costs.num_rounds == num_rounds + 16
    assert costs.verify_s(0, 1, 20) > before


@pytest.mark.parametrize(
    "untold",
    [
        [rounds(0.002)],
        [[*rounds(0.002), *rounds(0.004, depth=3)]],
        [rounds(0.002, 0.002), rounds(0.002, 0.002)],
    ],
    ids=["one round", "a draft among them", "two requests"],
)
def test_others_are_noted_one_by_one(untold: list[list[StepRecord]]) -> None:
    parts, asked = parts_that_noted()
    learn_all_costs(untold, 103, parts)
    assert "pass_over" not in asked
    assert asked.count("is_due") == len(untold[0])


def test_the_first_rounds_of_a_rest_are_noted_one_by_one_too() -> None:
    parts, asked = parts_that_noted()
    learn_all_costs([rounds(0.004, depth=3)], 103, parts)
    asked.clear()
    learn_all_costs([rounds(*[0.002] * 8)], 104, parts)
    assert asked.count("is_due") == 8
