"""Timed controllers and tables decide what they decide untimed, and every second is counted once."""

import itertools

import pytest

from monge.api import make_parts
from monge.bench.arms import Call, MongeArm
from monge.bench.decode import Choice
from monge.bench.own_time import OwnTime
from monge.control.base import PromptReader
from monge.control.cost_model import CostModel
from monge.control.price import Price
from monge.engine.clock import measured_by
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel
from tests.control.cost_scripts import kind

COSTS = {"plain": 1.0, "node": 0.01, "draft": 0.05}


def parts_with(controller):
    target, draft = (TabularModel(RandomTable(5, seed), 5) for seed in (1, 2))
    drafter = "pool('ngram', 'model')" if controller == "linear_selection" else "model"
    return make_parts(target, draft, drafter=drafter, controller=controller, costs=CostModel.linear(**COSTS))


def written(parts):
    (result,) = Decoder(parts).generate([(1, 2, 3)], max_new_tokens=40, temperature=1.0, seed=4)
    return result.token_ids, [record.plan for record in result.records]


@pytest.mark.parametrize("controller", ["price", "on_the_fly", "fsm", "fixed", "linear_selection", ("price", "fixed")])
def test_what_is_timed_decides_the_same(controller):
    own, ticks = OwnTime(), itertools.count(0.0)
    with measured_by(lambda: 0.0):  # on which what the clock itself takes is nothing
        timed = own.controllers_of(parts_with(controller))
    with measured_by(lambda: next(ticks)):
        assert written(timed) == written(parts_with(controller))
    assert own.planning_s > 0.0
    assert own.table_s == 0.0


def test_what_is_timed_is_of_the_same_kind():
    parts = OwnTime().controllers_of(parts_with("price"))
    assert isinstance(parts.controller, Price)
    assert parts.controller is parts.controllers["price"]
    assert parts.controller.max_window == Price().max_window
    assert isinstance(OwnTime().controllers_of(parts_with("linear_selection")).controller, PromptReader)


def test_work_that_calls_timed_work_is_counted_once():
    ticks = itertools.count(0.0)
    own = OwnTime()
    with measured_by(lambda: next(ticks)):
        own.run("planning_s", lambda: own.run("table_s", lambda: None))
        own.run("table_s", lambda: None)
    assert (own.planning_s, own.table_s) == (1.0, 1.0)


def test_what_the_clock_shows_of_an_empty_call_is_not_counted():
    ticks = itertools.count(0.0)
    own = OwnTime()
    with measured_by(lambda: next(ticks)):
        own.controllers_of(parts_with("fixed"))
        own.run("planning_s", lambda: None)
        own.run("table_s", lambda: next(ticks))
    assert (own.planning_s, own.table_s) == (0.0, 1.0)


def test_no_work_takes_less_than_nothing():
    """Where the machine was busy while it was found what the clock itself takes, that is more than a short call."""
    own, slow, fast = OwnTime(), itertools.count(0.0, 4.0), itertools.count(0.0)
    with measured_by(lambda: next(slow)):
        own.controllers_of(parts_with("fixed"))
    with measured_by(lambda: next(fast)):
        own.run("planning_s", lambda: None)
        own.run("planning_s", lambda: [next(fast) for _ in range(5)])
    assert own.planning_s == 2.0


def test_time_is_counted_where_the_work_fails():
    ticks = itertools.count(0.0)
    own = OwnTime()
    with measured_by(lambda: next(ticks)):
        with pytest.raises(ZeroDivisionError):
            own.run("planning_s", lambda: 1 / 0)
        own.run("planning_s", lambda: None)
    assert own.planning_s == 2.0


def test_the_table_is_timed_and_learns():
    own, costs = OwnTime(), CostModel.linear(**COSTS, learns=True)
    memory = own.memory(costs)
    assert memory.costs is costs
    costs.note_tail(True, 1.0)
    assert costs.is_due(kind(None), 1.0)
    assert own.table_s > 0.0
    assert own.memory(None).costs is None


def test_an_arm_notes_it_only_if_asked(tiny_pair):
    call = Call(prompt_ids=((5, 6, 7),), max_new_tokens=12, temperature=0.0, seed=0)
    noted = {}
    for asked in (False, True):
        choice = Choice(named_only=True, named=("price: controller=price",), own_time=asked)
        _, arm = choice.arms(tiny_pair)
        assert isinstance(arm, MongeArm)
        arm.prepare(tiny_pair, [1])
        noted[asked] = arm.decode(tiny_pair, call)
        again = arm.decode(tiny_pair, call)
        assert (again.planning_s > 0.0) is asked
    assert noted[True].planning_s > 0.0
    assert noted[True].table_s > 0.0
    assert noted[False].planning_s == noted[False].table_s == 0.0
    assert noted[True].token_ids == noted[False].token_ids
