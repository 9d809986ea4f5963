"""The default drafter: a lookup beside the draft model, if the controller chooses between them."""

from contextlib import nullcontext

import pytest

import monge
from monge.api import built_in, default_draft, make_components
from monge.control.latency import Latency
from monge.core.errors import OptionError
from monge.core.proposal import Iid
from monge.draft.model import ModelDrafter
from monge.draft.ngram import NgramDrafter
from monge.draft.pool import PoolDrafter
from monge.engine.decoder import Decoder
from monge.engine.notices import watched_by
from monge.loading.networks import load_network
from monge.testing.tabular import RandomTable, TabularModel
from monge.verify.single_draft import SingleDraft

VOCAB = 6


class OnlyDraws(SingleDraft):
    """A user's rule that is not exact for candidates that nobody draws."""

    accepts = frozenset({Iid})


def components(**settings):
    max_length = settings.pop("max_length", None)
    target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB, max_length) for seed in (1, 2))
    costs = Latency.linear(plain=1.0, node=0.01, draft=0.1)
    return make_components(target, draft, latency=costs, **({"controller": None} | settings))


@pytest.mark.parametrize(
    "controller", [None, "goodput", "hedge", "linear_selection", ("goodput", "fixed")]
)
def test_who_chooses_has_a_choice(controller):
    drafter = components(controller=controller).drafter
    assert isinstance(drafter, PoolDrafter)
    assert list(drafter.drafters) == ["ngram", "model"]
    assert drafter.drafters["ngram"] == NgramDrafter(min_ngram=2)


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
def test_who_does_not_has_the_draft_model(settings):
    """A verifier that is not exact for looked-up candidates, and a context too short for them, leave none either."""
    assert isinstance(components(**settings).drafter, ModelDrafter)


def test_without_a_draft_model_there_is_the_text():
    costs = Latency.linear(plain=1.0, node=0.1, draft=0.1)
    target = TabularModel(RandomTable(VOCAB, 1), VOCAB)
    made = make_components(target, controller=None, latency=costs)
    assert made.drafter == NgramDrafter()


def test_what_was_asked_for_goes_to_the_draft_model():
    made = components(tree="chain(5)", draft_temperature=0.5, draft_top_k=3).drafter
    assert made.drafters["model"].tree.depth == 5
    assert (made.drafters["model"].rules.temperature, made.drafters["model"].top_k) == (0.5, 3)


@pytest.mark.parametrize(
    "verifier",
    ["rrs", "rrs_without_replacement", "target_walk", "block", "traversal", "optimal", "gumbel"],
)
def test_every_verifier_decodes(verifier):
    made = Decoder(components(verifier=verifier))
    (result,) = made.generate([(0, 1, 2, 0, 1)], max_new_tokens=30, temperature=1.0)
    assert result.error is None
    assert len(result.token_ids) == 30


def test_a_seed_is_never_planned_with_lookups():
    asked = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3}
    (result,) = Decoder(components()).generate([(0, 1, 2, 0, 1)], **asked)
    assert {record.drafter for record in result.records if record.depth} == {"model"}
    assert not any(record.counterfactuals for record in result.records), "nobody looks at it"
    (expected,) = Decoder(components(controller="fixed")).generate([(0, 1, 2, 0, 1)], **asked)
    assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_a_limit_of_lookups_that_nobody_takes_is_refused(drafter):
    target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (1, 2))
    with pytest.raises(
        OptionError,
        match="model_free_depth=2 limits model-free drafters of a pool, and there are none",
    ):
        make_components(
            target,
            draft if drafter == "model" else None,
            drafter=drafter,
            controller="fixed(model_free_depth=2)",
        )
    with pytest.raises(OptionError, match="model_free_depth must be >= 0"):
        components(drafter="pool('ngram', 'model')", controller="fixed(model_free_depth=-1)")


def test_greedy_texts_are_the_targets():
    made, prompt = components(), (0, 1, 2, 0, 1)
    (result,) = Decoder(made).generate([prompt], max_new_tokens=80)
    plain = Decoder(make_components(TabularModel(RandomTable(VOCAB, 1), VOCAB), drafter="none"))
    assert result.token_ids == plain.generate([prompt], max_new_tokens=80)[0].token_ids
    assert "ngram" in result.stats.drafters


def test_the_built_in_pair_has_both():
    made = monge.load().components
    assert [member.name for member in made.shared.members] == ["ngram", "model"]
    with pytest.raises(OptionError, match="draft model"):
        monge.load(drafter="ngram", draft_backend="eager")


@pytest.mark.parametrize(
    ("target", "draft", "drafter", "expected"),
    [
        ("smollm2", None, None, "smollm2-head"),
        ("smollm2", None, "ngram", None),
        ("smollm2", "other", None, "other"),
        ("./smollm2", None, None, None),
        (None, None, None, built_in("draft")),
        (None, None, "ngram", None),
    ],
)
def test_drafts_that_come_with_a_target(target, draft, drafter, expected):
    assert default_draft(target, draft, drafter) == expected


def test_reading_weights_says_how_long_it_takes():
    seen = []

    def watch(name, expected_s):
        seen.append((name, expected_s))
        return nullcontext()

    with watched_by(watch):
        load_network(built_in("draft"))
    ((name, expected_s),) = seen
    assert name == "reading draft"
    assert expected_s > 0
