"""Several controllers over one set of parts."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from fastapi.testclient import TestClient

from monge.api import make_components
from monge.control.base import Controller
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.engine.batch import Batch
from monge.engine.decoder import Decoder
from tests.serve.served import toy_app, toy_decoder
from tests.serve.toy import Model

PROMPT = "once upon"
COSTS = Latency.linear(plain=1.0, node=0.01, draft=0.05)
OPTIONS = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Watched(Controller[str]):
    """Notes whom it plans for together, and whose rounds it learns from."""

    name: str
    planned: list[tuple[str, ...]] = field(default_factory=list)
    learnt: Counter = field(default_factory=Counter)

    def init(self, shared):
        shared.notes["who"] = self.name
        return self.name

    def plan(self, states, info, draws):
        self.planned.append(tuple(states))
        assert info.batch_size == 5
        return [DraftPlan(max_depth=1)] * len(states)

    def update(self, state, record):
        self.learnt[state] += 1
        assert record.batch_size == 5, "costs are those of the whole batch"
        return state


def test_each_controller_plans_for_its_own_together():
    first, other = Watched("first"), Watched("other")
    made = make_components(Model(1), Model(2), tree="chain(3)", controller=first)
    made = replace(made, controllers={"other": other})
    watched = Decoder(made, max_batch_size=5)
    batch = Batch(made)
    for row, name in enumerate((None, "other", None, "other", None)):
        (request,) = watched.requests([(row, 1)], max_new_tokens=2, controller=name)
        batch.join([watched.session(replace(request, adaptive=row != 4))])
    batch.step()
    assert (first.planned, other.planned) == ([("first",) * 2], [("other",) * 2])
    assert (first.learnt, other.learnt) == ({"first": 2}, {"other": 2})
    assert made.shared.notes["who"] == "first", "notes of controllers do not mix"
    batch.close()


def test_costs_are_shared_and_notes_are_not():
    offered = ("goodput", "goodput(max_window=2)", "on_the_fly")
    made = toy_decoder(controller=offered, latency=COSTS)
    for name in (None, *offered):
        (result,) = made.generate(PROMPT, seed=1, controller=name, **OPTIONS)
        assert result.error is None
    shared_states = [made.components.shared_for(name) for name in offered]
    latency = made.components.shared.latency
    assert shared_states[0] is made.components.shared
    assert all(shared.latency is latency is not None for shared in shared_states)
    noted = [set(shared.notes) & {"goodput", "on_the_fly"} for shared in shared_states]
    assert noted == [{"goodput"}, {"goodput"}, set()]
    assert shared_states[0].notes["goodput"] is not shared_states[1].notes["goodput"]


def test_a_prompt_is_profiled_for_those_who_ask():
    offered = ("linear_selection", "fixed")
    made = toy_decoder(controller=offered, drafter="pool('ngram', 'model')", latency=COSTS)
    prompts = [PROMPT, "and then " * 3, "the end"]
    for name in offered:
        results = made.generate(prompts, seed=1, controller=name, **OPTIONS)
        assert all(result.error is None for result in results)
    with TestClient(toy_app(made)) as client:
        for name in offered:
            body = {"prompt": PROMPT, "max_tokens": 2, "speculation": {"controller": name}}
            assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("controllers", "message"),
    [
        ((), "the list is empty"),
        (("fixed", " fixed "), "controller 'fixed' is given twice"),
        (("fixed", "nonsense"), "unknown controller 'nonsense'"),
        (("fixed", "hedge"), "there is only one"),
    ],
    ids=str,
)
def test_lists_that_cannot_be(controllers, message):
    with pytest.raises(OptionError, match=message):
        toy_decoder(controller=controllers, latency=COSTS)


def test_offline_an_unknown_name_is_refused_too():
    with pytest.raises(OptionError, match=r"unknown controller 'prize'.*Known: fixed, fsm"):
        toy_decoder(controller=("fsm", "fixed")).generate(PROMPT, controller="prize")
