"""Requests that name one of the server's controllers."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from monge.api import make_components
from monge.control.base import Controller
from monge.control.fixed import Fixed
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.engine.decoder import Decoder
from monge.serve.scheduler import Scheduler
from tests.serve.served import toy_app, toy_decoder
from tests.serve.toy import Model, alone, decoder, generation, submit

PROMPT = "once upon"
OFFERED = ("fixed(max_depth=2)", "fsm(first=2)", "fixed")
COSTS = Latency.linear(plain=1.0, node=0.01, draft=0.05)


@pytest.fixture(scope="module")
def client():
    with TestClient(
        toy_app(toy_decoder(controller=OFFERED)), raise_server_exceptions=False
    ) as made:
        yield made


def ask(client, **fields):
    return client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True} | fields
    )


def text(client, **fields):
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("name", OFFERED)
def test_a_request_gets_what_a_server_with_that_controller_alone_writes(client, name):
    (offline,) = toy_decoder(controller=name).generate(
        PROMPT, max_new_tokens=20, temperature=1.0, seed=5, ignore_eos=True
    )
    assert text(client, seed=5, speculation={"controller": name}) == offline.text
    (named,) = toy_decoder(controller=OFFERED).generate(
        PROMPT, max_new_tokens=20, temperature=1.0, seed=5, ignore_eos=True, controller=name
    )
    assert named.text == offline.text
    assert [record.plan for record in named.records] == [record.plan for record in offline.records]


def test_who_names_none_gets_the_first(client):
    assert text(client, seed=5) == text(client, seed=5, speculation={"controller": OFFERED[0]})


@pytest.mark.parametrize(
    "parts",
    [
        {"temperature": 0},
        {"verifier": "gumbel", "tree": "chain(3, 'shared')"},
        {"tree": "chain(3, 'top')"},
    ],
)
def test_where_the_draws_do_not_depend_on_the_plan_all_write_the_same(parts):
    fields = {"temperature": parts["temperature"]} if "temperature" in parts else {}
    chosen = {name: value for name, value in parts.items() if name != "temperature"}
    with TestClient(toy_app(toy_decoder(controller=OFFERED, **chosen))) as client:
        assert (
            len(
                {
                    text(client, seed=5, speculation={"controller": name}, **fields)
                    for name in OFFERED
                }
            )
            == 1
        )


def test_limits_hold_beside_it(client):
    answer = ask(client, seed=1, speculation={"controller": "fixed", "max_depth": 1}).json()
    assert not any(answer["metrics"]["speculative_decoding"]["acceptance_histogram"][2:])


@pytest.mark.parametrize(
    ("speculation", "param", "message"),
    [
        ({"controller": "goodput"}, "speculation.controller", f"there are: {', '.join(OFFERED)}"),
        ({"controller": ""}, "speculation.controller", "no such controller here"),
        ({"controller": "../../etc/passwd"}, "speculation.controller", "no such controller here"),
        ({"controller": ["fixed"]}, "speculation.controller", "valid string"),
        (
            {"controller": "fixed", "adaptive": False},
            "speculation.controller",
            "adaptive=false asks for none",
        ),
    ],
    ids=str,
)
def test_refusals_say_why(client, speculation, param, message):
    answer = ask(client, speculation=speculation)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert "passwd" not in error["message"]


def test_a_controller_without_a_name_cannot_be_named():
    with TestClient(toy_app(toy_decoder(controller=Fixed()))) as client:
        answer = ask(client, speculation={"controller": "fixed"})
    assert answer.status_code == 400
    assert "has no name" in answer.json()["error"]["message"]


def samples(client, name):
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        one.labels["controller"]: one.value
        for family in families
        for one in family.samples
        if one.name == name
    }


def test_they_are_counted_apart():
    with TestClient(toy_app(toy_decoder(controller=OFFERED))) as client:
        for asked in (
            None,
            {"controller": "fixed"},
            {"controller": "fixed", "max_depth": 0},
            {"adaptive": False},
            False,
        ):
            text(client, seed=1, speculation=asked)
        assert ask(client, speculation={"controller": "other"}).status_code == 400
        requests = samples(client, "monge:requests_by_controller_total")
        assert requests == {OFFERED[0]: 1, OFFERED[1]: 0, "fixed": 1, "none": 3}
        tokens = samples(client, "monge:draft_tokens_by_controller_total")
        assert (tokens[OFFERED[1]], tokens["none"] > 0, tokens["fixed"] > tokens[OFFERED[0]]) == (
            0,
            True,
            True,
        )
        for ours, theirs in (
            ("monge:rounds_by_controller_total", "monge:target_rounds_total"),
            ("monge:drafts_by_controller_total", "vllm:spec_decode_num_drafts_total"),
            ("monge:draft_tokens_by_controller_total", "vllm:spec_decode_num_draft_tokens_total"),
            (
                "monge:accepted_tokens_by_controller_total",
                "vllm:spec_decode_num_accepted_tokens_total",
            ),
        ):
            (line,) = [
                line
                for line in client.get("/metrics").text.splitlines()
                if line.startswith(theirs + "{")
            ]
            assert sum(samples(client, ours).values()) == float(line.rpartition(" ")[2])


def test_neighbours_write_what_they_write_alone():
    names = [*OFFERED, None]
    generations = [
        generation(row % 7, 1, seed=row, tokens=6 + row % 5, controller=names[row % 4])
        for row in range(12)
    ]
    with Scheduler(decoder(controller=OFFERED), max_batch_size=8) as scheduler:
        handles = [submit(scheduler, one) for one in generations]
        texts = [handle.completion(60).token_ids for handle in handles]
    assert texts == [
        alone(replace(one, controller=None), controller=one.controller or OFFERED[0])
        for one in generations
    ]


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
    made = replace(
        make_components(Model(1), Model(2), tree="chain(3)", controller=first),
        controllers={"other": other},
    )
    watched = Decoder(made, max_batch_size=5)
    requests = [
        replace(
            watched.requests([(row, 1)], max_new_tokens=2, controller=name)[0], adaptive=row != 4
        )
        for row, name in enumerate((None, "other", None, "other", None))
    ]
    from monge.engine.batch import Batch

    batch = Batch(made)
    batch.join([watched.session(request) for request in requests])
    batch.step()
    assert (first.planned, other.planned) == ([("first",) * 2], [("other",) * 2])
    assert (first.learnt, other.learnt) == ({"first": 2}, {"other": 2})
    assert made.shared.notes["who"] == "first", "notes of controllers do not mix"
    batch.close()


def test_costs_are_shared_and_notes_are_not():
    offered = ("goodput", "goodput(max_window=2)", "on_the_fly")
    made = toy_decoder(controller=offered, latency=COSTS)
    for name in (None, *offered):
        (result,) = made.generate(
            PROMPT, max_new_tokens=20, temperature=1.0, seed=1, ignore_eos=True, controller=name
        )
        assert result.error is None
    shared_states = [made.components.planner(name).shared for name in offered]
    assert shared_states[0] is made.components.shared
    assert all(
        shared.latency is made.components.shared.latency is not None for shared in shared_states
    )
    assert [set(shared.notes) & {"goodput", "on_the_fly"} for shared in shared_states] == [
        {"goodput"},
        {"goodput"},
        set(),
    ]
    assert shared_states[0].notes["goodput"] is not shared_states[1].notes["goodput"]


def test_a_prompt_is_profiled_for_those_who_ask():
    offered = ("linear_selection", "fixed")
    made = toy_decoder(controller=offered, drafter="pool('ngram', 'model')", latency=COSTS)
    prompts = [PROMPT, "and then " * 3, "the end"]
    for name in offered:
        results = made.generate(
            prompts, max_new_tokens=12, temperature=1.0, seed=1, ignore_eos=True, controller=name
        )
        assert all(result.error is None for result in results)
    with TestClient(toy_app(made)) as client:
        for name in offered:
            text(client, speculation={"controller": name})


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
