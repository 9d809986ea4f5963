"""Default controllers and drafters.

Clocks decide only where no seed has to reproduce the text; a lookup drafts beside the draft model where the controller chooses
between them.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import monge
from monge.api import built_in, default_draft, make_components
from monge.control.fixed import Fixed
from monge.control.goodput import Goodput
from monge.control.latency import Latency
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.model import Model
from monge.draft.ngram import Ngram
from monge.draft.pool import Pool
from monge.engine.decoder import Decoder
from monge.laws.proposal import Iid
from monge.loading.named_models import PackagedModel
from monge.loading.networks import load_network
from monge.loading.sources import ModelSource
from monge.runtime.notices import watched_by
from monge.verify.speculative_sampling import SpeculativeSampling
from tests.kit.tables import table
from tests.serve.served import toy_app, toy_decoder

VOCAB = 6
CHEAP = {"plain": 1.0, "node": 0.0, "draft": 0.01}
DEAR = {"plain": 1.0, "node": 0.9, "draft": 0.5}
PROMPT = (0, 1, 2, 0, 1)


def components(costs=CHEAP, *, max_length=None, **parts):
    draft = table(2, VOCAB, max_length) if "model" in parts.get("drafter", "model") else None
    settings = {"controller": None} | parts
    target = table(1, VOCAB, max_length)
    return make_components(target, draft, latency=Latency.linear(**costs), **settings)


def write(parts, **options):
    asked = {"max_new_tokens": 60, "temperature": 1.0} | options
    (result,) = Decoder(parts).generate([PROMPT], **asked)
    assert result.error is None
    return result


def windows(result):
    """Windows of the rounds, but for the last ones, which the room for tokens shortens."""
    return {record.plan.max_depth for record in result.records[:-4]}


def test_both_can_be_named():
    parts = components()
    assert list(parts.controllers) == ["goodput", "fixed"]
    assert (parts.controller_name, parts.seeded) == ("goodput", "fixed")
    assert parts.shared_for("goodput") is parts.shared, "named or not"
    assert windows(write(parts, seed=3, controller="goodput")) != {3}
    assert windows(write(parts, controller="fixed")) == {3}
    with pytest.raises(OptionError, match="Known: fixed, goodput"):
        write(parts, controller="fsm")


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_a_seed_writes_what_it_writes_under_a_fixed_plan(costs):
    expected = write(components(controller="fixed"), seed=3)
    found = write(components(costs), seed=3)
    assert (found.token_ids, found.seed) == (expected.token_ids, 3)
    nodes = [[record.num_nodes for record in one.records] for one in (found, expected)]
    assert nodes[0] == nodes[1]
    assert {record.drafter for record in found.records if record.depth} == {"model"}
    assert not any(record.counterfactuals for record in found.records), "nobody looks at it"


def test_rows_of_one_seed_are_planned_alike():
    options = {"seed": 3, "max_new_tokens": 60, "temperature": 1.0}
    results = Decoder(components()).generate([(1, 2), (3,), (4,)], **options)
    assert [windows(result) for result in results] == [{3}] * 3


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 0.0, "seed": 3}])
def test_costs_decide_where_there_is_no_text_to_give_again(options):
    """Drafts that cost nothing are longer than a fixed plan's, dear ones are left out."""
    cheap, dear = (write(components(costs), **options) for costs in (CHEAP, DEAR))
    assert max(windows(cheap)) > 3
    assert dear.stats.block_efficiency < cheap.stats.block_efficiency


def test_only_seeds_that_give_the_text_again_are_told():
    assert write(components()).seed is None
    assert write(components(controller="goodput"), seed=3).seed is None
    assert write(components(controller="fixed")).seed is not None
    assert write(components(), temperature=0.0).seed is not None


@pytest.mark.parametrize(
    "parts",
    [
        {"drafter": "ngram"},
        {"drafter": "suffix"},
        {"drafter": "pool('ngram', 'suffix')"},
        {"tree": "chain(4, 'top')"},
        {"verifier": "gumbel"},
    ],
    ids=str,
)
def test_costs_decide_where_a_seed_gives_the_text_whatever_is_drafted(parts):
    cheap, dear = (write(components(costs, **parts), seed=3) for costs in (CHEAP, DEAR))
    fixed = write(components(controller="fixed", **parts), seed=3)
    assert cheap.token_ids == dear.token_ids == fixed.token_ids
    assert [one.plan for one in cheap.records] != [one.plan for one in dear.records]
    assert cheap.seed == 3


@pytest.mark.parametrize(
    ("parts", "steady"),
    [
        ({}, Fixed(max_depth=3, model_free_depth=0)),
        ({"drafter": "model"}, Fixed(max_depth=3)),
        ({"tree": "chain(5)"}, Fixed(model_free_depth=0)),
        ({"drafter": "ngram"}, Fixed()),
    ],
)
def test_a_tree_that_was_asked_for_is_drafted_whole(parts, steady):
    assert components(**parts).controllers["fixed"] == steady


def test_a_drafter_of_nothing_needs_no_latency():
    parts = make_components(table(1, VOCAB), drafter="none", controller=None)
    assert list(parts.controllers) == ["fixed"]
    assert not parts.reads
    assert parts.shared.latency is None


class Raising(Ngram):
    def draft(self, *_, **__):
        raise RuntimeError("no more ideas")


@pytest.mark.filterwarnings("ignore:request 0. the drafter failed:UserWarning")
def test_a_drafter_that_raises_leaves_plain_decoding():
    result = write(make_components(table(1, VOCAB), drafter=Raising(), controller=None), seed=3)
    expected = write(make_components(table(1, VOCAB), drafter="none"), seed=3)
    assert result.token_ids == expected.token_ids


def test_a_short_context_gets_a_short_chain():
    assert components(max_length=6).drafter.capabilities.max_depth == 3
    assert components(max_length=9).drafter.capabilities.max_depth == 8


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
        options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        (offline,) = made.generate("once upon", **options)
        assert answer["choices"][0]["text"] == offline.text


@pytest.mark.parametrize(
    "controller", [None, "goodput", "hedge", "linear_selection", ("goodput", "fixed")]
)
def test_a_controller_that_selects_gets_lookups_too(controller):
    drafter = components(controller=controller).drafter
    assert isinstance(drafter, Pool)
    assert drafter.drafters.keys() == {"ngram", "model"}
    assert drafter.drafters["ngram"] == Ngram(min_ngram=2)


class OnlyDraws(SpeculativeSampling):
    """A user's rule that is not exact for candidates that nobody draws."""

    accepts = frozenset({Iid})


@pytest.mark.parametrize(
    "settings",
    [
        {"controller": "fixed"},
        {"controller": ("fixed", "goodput")},
        {"controller": "on_the_fly"},
        {"drafter": "model"},
        {"verifier": OnlyDraws()},
        {"max_length": 6},
    ],
    ids=str,
)
def test_the_draft_model_drafts_alone(settings):
    """Also where the verifier is not exact for lookups, or the context is too short for them."""
    assert isinstance(components(**settings).drafter, Model)


def test_without_a_draft_model_the_text_drafts():
    assert make_components(table(1, VOCAB), controller=None).drafter == Ngram()


def test_what_was_asked_for_goes_to_the_draft_model():
    rules = SamplingRules(temperature=0.5)
    drafter = "pool('ngram', 'model(top_k=3)')"
    drafter = components(tree="chain(5)", drafter=drafter, draft_rules=rules).drafter
    model = drafter.drafters["model"]
    assert (model.tree.depth, model.rules.temperature, model.top_k) == (5, 0.5, 3)


@pytest.mark.parametrize(
    "verifier",
    [
        *("recursive_rejection", "recursive_rejection_without_replacement", "sample_and_match"),
        *("block", "traversal", "optimal", "gumbel"),
    ],
)
def test_every_verifier_decodes(verifier):
    result = write(components(verifier=verifier), max_new_tokens=30)
    assert len(result.token_ids) == 30


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_a_limit_of_lookups_that_nobody_takes_is_refused(drafter):
    message = "model_free_depth=2 limits model-free drafters of a pool, and there are none"
    with pytest.raises(OptionError, match=message):
        components(drafter=drafter, controller="fixed(model_free_depth=2)")
    with pytest.raises(OptionError, match="model_free_depth must be >= 0"):
        components(controller="fixed(model_free_depth=-1)")


def test_greedy_texts_are_the_targets():
    result = write(components(), max_new_tokens=80, temperature=0.0)
    plain = make_components(table(1, VOCAB), drafter="none")
    assert result.token_ids == write(plain, max_new_tokens=80, temperature=0.0).token_ids
    assert "ngram" in result.stats.drafters


def test_the_built_in_pair():
    made = monge.load().components
    assert isinstance(made.controller, Goodput)
    assert made.seeded == "fixed"
    assert [member.name for member in made.shared.members] == ["ngram", "model"]
    with pytest.raises(OptionError, match="draft model"):
        monge.load(drafter="ngram", draft_backend="eager")


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        ("smollm2", None, "smollm2-head"),
        ("smollm2", "ngram", None),
        ("./smollm2", None, None),
        (None, None, built_in("draft")),
        (None, "ngram", None),
        (None, "pool('ngram', 'model')", built_in("draft")),
    ],
)
def test_drafts_that_come_with_a_target(monkeypatch, target, drafter, expected):
    monkeypatch.setattr(PackagedModel, "path", lambda _: Path("smollm2.gguf"))
    assert default_draft(ModelSource.of(target), drafter) == expected


def test_reading_weights_says_how_long_it_takes():
    seen = []
    with watched_by(lambda *said: seen.append(said) or nullcontext()):
        load_network(built_in("draft"))
    ((name, expected_s),) = seen
    assert name == "reading draft"
    assert expected_s > 0
