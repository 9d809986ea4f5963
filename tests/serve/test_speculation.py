"""What a request may say about speculation: limits of its trees, and which of several controllers plans, if any."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from fastapi.testclient import TestClient

from monge.api import make_components
from monge.control.base import Controller
from monge.control.fixed import Fixed
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.engine.batch import Batch
from monge.engine.decoder import Decoder
from monge.serve.api.fields import MAX_DRAFT
from monge.serve.scheduling.scheduler import Scheduler
from tests.serve.served import samples, toy_app, toy_decoder
from tests.serve.toy import Model, alone, decoder, generation, submit

PROMPT = "once upon"
TREE = "fixed_width((2, 1, 1))"
OFFERED = ("fixed(max_depth=2)", "fsm(first=2)", "fixed")
OPTIONS = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def client():
    with TestClient(toy_app(toy_decoder(tree=TREE)), raise_server_exceptions=False) as made:
        yield made


@pytest.fixture(scope="module")
def offering():
    with TestClient(toy_app(toy_decoder(controller=OFFERED))) as made:
        yield made


def ask(client, **fields):
    start = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
    return client.post("/v1/completions", json=start | fields)


def complete(client, **fields):
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(client, **fields):
    return complete(client, **fields)["choices"][0]["text"]


def figures(body):
    return body["metrics"]["speculative_decoding"]


def offline(**parts):
    return toy_decoder(**({"tree": TREE} | parts)).generate(PROMPT, seed=5, **OPTIONS)[0]


@pytest.mark.parametrize(
    ("limits", "controller"),
    [
        ({"max_depth": 1}, "fixed(max_depth=1)"),
        ({"max_nodes": 3}, "fixed(max_nodes=3)"),
        ({"max_depth": 2, "max_nodes": 3, "adaptive": True}, "fixed(max_depth=2, max_nodes=3)"),
        ({"max_depth": MAX_DRAFT}, "fixed"),
        ({}, "fixed"),
    ],
    ids=str,
)
def test_limits_are_those_of_a_controller_that_has_them(client, limits, controller):
    body = complete(client, seed=5, speculation=limits)
    result, told = offline(controller=controller), figures(body)
    assert body["choices"][0]["text"] == result.text
    assert told["num_draft_tokens"] == sum(record.num_nodes for record in result.records) > 0
    depth = limits.get("max_depth", MAX_DRAFT)
    assert not any(told["acceptance_histogram"][depth + 1 :])


@pytest.mark.parametrize("limits", [{"max_depth": 0}, {"max_nodes": 0, "adaptive": False}], ids=str)
def test_no_room_is_no_speculation(client, limits):
    body, off = [complete(client, seed=5, speculation=one) for one in (limits, False)]
    assert body["choices"] == off["choices"]
    assert figures(body)["num_draft_tokens"] == 0


def test_without_the_controller_a_seed_has_its_text_under_one_that_rests():
    with TestClient(toy_app(toy_decoder(tree=TREE, controller="fixed(max_depth=0)"))) as client:
        as_planned = complete(client, seed=5)
        asked = complete(client, seed=5, speculation={"adaptive": False, "max_depth": 2})
    assert figures(as_planned)["num_draft_tokens"] == 0
    assert asked["choices"][0]["text"] == offline(controller="fixed(max_depth=2)").text
    assert figures(asked)["num_draft_tokens"] > 0


def test_a_controller_that_is_an_object_is_named_by_its_text():
    with TestClient(toy_app(toy_decoder(controller=Fixed(max_depth=2)))) as client:
        assert ask(client, speculation={"controller": "fixed(max_depth=2)"}).status_code == 200
        answer = ask(client, speculation={"controller": "fixed"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("there are: fixed(max_depth=2)")


@pytest.mark.parametrize("name", OFFERED)
def test_a_request_gets_what_a_server_with_that_controller_alone_writes(offering, name):
    own = toy_decoder(controller=name).generate(PROMPT, seed=5, **OPTIONS)[0]
    named = toy_decoder(controller=OFFERED).generate(PROMPT, seed=5, controller=name, **OPTIONS)[0]
    assert text(offering, seed=5, speculation={"controller": name}) == named.text == own.text
    assert [record.plan for record in named.records] == [record.plan for record in own.records]
    if name == OFFERED[0]:
        assert text(offering, seed=5) == own.text, "who names none gets the first"


@pytest.mark.parametrize(
    ("parts", "fields"),
    [
        ({}, {"temperature": 0}),
        ({"verifier": "gumbel", "tree": "chain(3, 'shared')"}, {}),
        ({"tree": "chain(3, 'top')"}, {}),
    ],
)
def test_if_the_draws_do_not_depend_on_the_plan_all_write_the_same(parts, fields):
    with TestClient(toy_app(toy_decoder(controller=OFFERED, **parts))) as client:
        asked = [{"controller": name} for name in OFFERED]
        assert len({text(client, seed=5, speculation=one, **fields) for one in asked}) == 1


def counted(client, name, label):
    told = samples(client.get("/metrics").text)
    return {one.labels.get(label): one.value for one in told if one.name == name}


def test_requests_and_drafts_are_counted_by_controller():
    with TestClient(toy_app(toy_decoder(controller=OFFERED))) as client:
        none = {"controller": "fixed", "max_depth": 0}
        for asked in (None, True, {"controller": "fixed"}, none, {"adaptive": False}, False):
            text(client, seed=1, speculation=asked)
        assert ask(client, speculation={"controller": "other"}).status_code == 400
        asked = counted(client, "monge:requests_by_speculation_total", "speculation")
        assert asked == {"default": 2, "off": 1, "options": 3}
        requests = counted(client, "monge:requests_by_controller_total", "controller")
        assert requests == {OFFERED[0]: 2, OFFERED[1]: 0, "fixed": 1, "none": 3}
        tokens = counted(client, "monge:draft_tokens_by_controller_total", "controller")
        assert tokens[OFFERED[1]] == 0
        assert tokens["none"] > 0
        assert 2 * tokens["fixed"] > tokens[OFFERED[0]]
        names = ("drafts", "draft_tokens", "accepted_tokens")
        totals = {name: f"vllm:spec_decode_num_{name}_total" for name in names}
        for ours, theirs in (totals | {"rounds": "monge:target_rounds_total"}).items():
            parts = counted(client, f"monge:{ours}_by_controller_total", "controller")
            assert sum(parts.values()) == counted(client, theirs, None)[None]


def test_neighbours_write_what_they_write_alone():
    options = [
        {},
        {"limits": DraftPlan(max_depth=1)},
        {"adaptive": False, "limits": DraftPlan(max_nodes=2)},
        {"speculative": False},
        *({"controller": name} for name in OFFERED),
    ]
    parts = {"tree": TREE, "controller": OFFERED}
    made = [generation(row, 1, seed=row, tokens=6 + row, **options[row]) for row in range(7)]
    with Scheduler(decoder(**parts, max_batch_size=8)) as scheduler:
        handles = [submit(scheduler, one) for one in made]
        texts = [handle.completion(60).token_ids for handle in handles]
    with Scheduler(decoder(**parts, max_batch_size=1)) as scheduler:
        assert texts == [submit(scheduler, one).completion(60).token_ids for one in made]
    assert texts[0] == alone(made[0], tree=TREE, controller=OFFERED[0])
    for one, text, name in zip(made[4:], texts[4:], OFFERED, strict=True):
        assert text == alone(replace(one, controller=None), tree=TREE, controller=name)


COSTS = Latency.linear(plain=1.0, node=0.01, draft=0.05)


@dataclass(frozen=True, slots=True)
class Watched(Controller[str]):
    """Notes whom it plans for together, and whose rounds it learns from."""

    name: str
    planned: list[tuple[str, ...]] = field(default_factory=list)
    learnt: Counter = field(default_factory=Counter)

    def init(self, shared):
        assert shared.memory is None
        return self.name

    def plan(self, states, info, draws):
        self.planned.append(tuple(states))
        assert (info.batch_size, info.memory) == (5, None)
        return [DraftPlan(max_depth=1)] * len(states)

    def update(self, state, record):
        self.learnt[state] += 1
        assert record.batch_size == 5, "costs are those of the whole batch"
        return state

    def learn(self, memory, state, record):
        return *(memory or ()), state


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
    memories = made.shared_for(None).memory, made.shared_for("other").memory
    assert memories == (("first",) * 2, ("other",) * 2), "memories of controllers do not mix"
    batch.close()


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
def test_bad_lists_of_controllers_are_refused(controllers, message):
    with pytest.raises(OptionError, match=message):
        toy_decoder(controller=controllers, latency=COSTS)


def test_offline_an_unknown_name_is_refused_too():
    with pytest.raises(OptionError, match=r"unknown controller 'prize'.*Known: fixed, fsm"):
        toy_decoder(controller=("fsm", "fixed")).generate(PROMPT, controller="prize")
