"""The default controllers: clocks decide only where no seed has to reproduce the text."""

import pytest
from fastapi.testclient import TestClient

import monge
from monge.api import make_components
from monge.control.fixed import Fixed
from monge.control.goodput import Goodput
from monge.control.latency import Latency
from monge.core.errors import OptionError
from monge.draft.ngram import NgramDrafter
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel
from tests.serve.served import toy_app, toy_decoder

VOCAB = 6
CHEAP = {"plain": 1.0, "node": 0.0, "draft": 0.01}
DEAR = {"plain": 1.0, "node": 0.9, "draft": 0.5}
SAMPLED = {"max_new_tokens": 60, "temperature": 1.0}


def decoder(costs=CHEAP, *, max_length=None, **parts):
    target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB, max_length) for seed in (1, 2))
    resources = {} if parts.get("drafter", "model") != "model" else {"draft": draft}
    return Decoder(
        make_components(
            target, **resources, latency=Latency.linear(**costs), **({"controller": None} | parts)
        )
    )


def windows(result):
    """Windows of the rounds, but for the last ones, which the room for tokens shortens."""
    return {record.plan.max_depth for record in result.records[:-4]}


def write(made, **options):
    (result,) = made.generate([(1, 2)], **(SAMPLED | options))
    return result


def test_both_can_be_named():
    parts = decoder().components
    assert list(parts.controllers) == ["goodput", "fixed"]
    assert (parts.controller_name, parts.seeded) == ("goodput", "fixed")
    assert parts.shared_for("goodput") is parts.shared, "what price learns is its own, named or not"


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_a_seed_writes_what_it_writes_under_a_fixed_plan(costs):
    expected = write(decoder(controller="fixed"), seed=3)
    got = write(decoder(costs), seed=3)
    assert got.token_ids == expected.token_ids
    assert got.seed == 3
    assert [record.num_nodes for record in got.records] == [
        record.num_nodes for record in expected.records
    ]


def test_rows_of_one_seed_are_planned_alike():
    results = decoder().generate([(1, 2), (3,), (4,)], seed=3, **SAMPLED)
    assert [windows(result) for result in results] == [{3}] * 3


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 0.0, "seed": 3}])
def test_price_plans_where_there_is_no_text_to_give_again(options):
    """Drafts that cost nothing are longer than a fixed plan's, dear ones are left out."""
    assert max(windows(write(decoder(CHEAP), **options))) > 3
    assert (
        write(decoder(DEAR), **options).stats.block_efficiency
        < write(decoder(CHEAP), **options).stats.block_efficiency
    )


def test_only_seeds_that_give_the_text_again_are_told():
    assert write(decoder()).seed is None
    assert write(decoder(controller="goodput"), seed=3).seed is None
    assert write(decoder(controller="fixed")).seed is not None
    assert write(decoder(), temperature=0.0).seed is not None
    again = write(decoder(), seed=3)
    assert write(decoder(DEAR), seed=again.seed).token_ids == again.token_ids


DRAWING_NOTHING = (
    *("ngram", "suffix", "token_recycling", "lookahead", "jacobi", "pool('ngram', 'suffix')"),
)


@pytest.mark.parametrize(
    "parts",
    [
        *({"drafter": name} for name in DRAWING_NOTHING),
        {"tree": "chain(4, 'top')"},
        {"verifier": "gumbel"},
    ],
)
def test_price_plans_where_a_seed_gives_the_text_whatever_is_drafted(parts):
    cheap, dear = (write(decoder(costs, **parts), seed=3) for costs in (CHEAP, DEAR))
    assert (
        cheap.token_ids
        == dear.token_ids
        == write(decoder(controller="fixed", **parts), seed=3).token_ids
    )
    assert [one.plan for one in cheap.records] != [one.plan for one in dear.records]
    assert cheap.seed == 3


@pytest.mark.parametrize(
    ("parts", "steady"),
    [
        ({}, Fixed(max_depth=3, model_free_depth=0)),
        ({"drafter": "model"}, Fixed(max_depth=3)),
        ({"tree": "chain(5)"}, Fixed(model_free_depth=0)),
        (
            {"verifier": "rrs_without_replacement", "tree": "fixed_width((2, 2))"},
            Fixed(model_free_depth=0),
        ),
        ({"drafter": "ngram"}, Fixed()),
    ],
)
def test_a_tree_that_was_asked_for_is_drafted_whole(parts, steady):
    assert decoder(**parts).components.controllers["fixed"] == steady


def test_who_drafts_nothing_needs_no_latency():
    parts = make_components(
        TabularModel(RandomTable(VOCAB, 1), VOCAB), drafter="none", controller=None
    )
    assert (list(parts.controllers), parts.reads, parts.shared.latency) == (
        ["fixed"],
        frozenset(),
        None,
    )


class Raising(NgramDrafter):
    def draft(self, *_, **__):
        raise RuntimeError("no more ideas")


@pytest.mark.filterwarnings("ignore:request .* the drafter failed")
def test_a_drafter_that_raises_leaves_plain_decoding():
    target = TabularModel(RandomTable(VOCAB, 1), VOCAB)
    result = write(Decoder(make_components(target, drafter=Raising(), controller=None)), seed=3)
    expected = write(Decoder(make_components(target, drafter="none")), seed=3)
    assert (result.token_ids, result.error) == (expected.token_ids, None)


def test_a_short_context_gets_a_short_chain():
    assert decoder(max_length=6).components.drafter.capabilities.max_depth == 3
    assert decoder(max_length=9).components.drafter.capabilities.max_depth == 8


def test_one_can_be_asked_for():
    made = decoder()
    assert windows(write(made, seed=3, controller="goodput")) != {3}
    assert windows(write(made, controller="fixed")) == {3}
    with pytest.raises(OptionError, match="Known: fixed, goodput"):
        write(made, controller="fsm")


def test_what_loads_takes_it():
    parts = monge.load().components
    assert isinstance(parts.controller, Goodput)
    assert parts.seeded == "fixed"


@pytest.mark.parametrize(
    ("fields", "is_told"),
    [
        ({}, False),
        ({"seed": 3}, True),
        ({"temperature": 0}, True),
        ({"speculation": False}, True),
        ({"speculation": {"adaptive": False}}, True),
        ({"speculation": {"controller": "fixed"}}, True),
        ({"seed": 3, "speculation": {"controller": "goodput"}}, False),
    ],
)
def test_a_server_plans_likewise(fields, is_told):
    made = toy_decoder(controller=None, latency=Latency.linear(**CHEAP))
    with TestClient(toy_app(made)) as client:
        asked = {"prompt": "once upon", "max_tokens": 20, "ignore_eos": True} | fields
        answer = client.post("/v1/completions", json=asked).json()
    assert (answer["seed"] is not None) is is_told
    if "seed" in fields and is_told:
        (offline,) = made.generate(
            "once upon", max_new_tokens=20, temperature=1.0, seed=3, ignore_eos=True
        )
        assert answer["choices"][0]["text"] == offline.text
