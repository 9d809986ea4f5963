"""What compact logs answer exactly, and what they refuse."""

import pytest

from monge.replay.costs import RoundCosts
from monge.replay.log import UnavailableError
from monge.replay.simulate import simulate
from monge.testing.oracle import law_error
from tests.replay.toys import logged, models, real_stories, replayed_stories, toy_parts

TEXT = (0, 1, 1, 2)
FREE = RoundCosts.linear(plain=1.0, node=0.0, draft=0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"tree": "chain(2)", "verifier": "single_draft"},
        {"tree": "chain(2)", "verifier": "block"},
        {"tree": "chain(2, 'top')", "verifier": "target_walk"},
        {"tree": "fixed_width((2,), 'iid')", "verifier": "target_walk"},
        {"tree": "fixed_width((2,), 'greedy_plus_one')", "verifier": "greedy"},
    ],
)
def test_acceptance_stays_exact(options):
    """Of every law one token and the committed one are kept.

    Accepted tokens have the exact law still.
    """

    def accepted(stories):
        law = {}
        for (text, story), prob in stories.items():
            key = text, tuple(count for count, *_ in story)
            law[key] = law.get(key, 0.0) + prob
        return law

    real, replayed = real_stories(3, 2, **options), replayed_stories(3, 2, top=1, **options)
    assert law_error(accepted(real), accepted(replayed)) < 1e-12


@pytest.mark.parametrize("verifier", ["rrs", "k_seq", "optimal", "rrs_without_replacement"])
def test_rules_that_test_several_draws_are_refused(verifier):
    log = logged(models(4)[0], TEXT, top=1)
    parts = toy_parts(4, tree="fixed_width((2,), 'iid')", verifier=verifier)
    message = r"the log keeps \d tokens of a law, and \d of 4 draftable ones are not among them"
    with pytest.raises(UnavailableError, match=message):
        simulate(parts, log, FREE, repeats=20)


def test_enough_tokens_answer_everything():
    """Where a compact log covers the draft law, nothing is missing.

    Four tokens, of which two can be drafted.
    """
    options = {"tree": "fixed_width((2,), 'iid')", "verifier": "rrs", "draft_top_k": 1}
    replayed = replayed_stories(3, 2, top=2, **options)
    assert law_error(real_stories(3, 2, **options), replayed) < 1e-12


@pytest.mark.parametrize(
    ("parts", "top", "message"),
    [
        (
            {"tree": "fixed_width((2, 1))", "verifier": "traversal"},
            None,
            "on trees it decides by target laws off the text",
        ),
        (
            {"tree": "fixed_width((2,), 'iid')", "verifier": "layer"},
            None,
            "replay knows Block, .*TargetWalk, Traversal",
        ),
    ],
)
def test_what_a_log_cannot_say_is_refused_with_the_reason(parts, top, message):
    log = logged(models(3)[0], TEXT, top=top)
    with pytest.raises(UnavailableError, match=f"cannot be replayed here: .*{message}"):
        simulate(toy_parts(3, **parts), log, FREE)


def test_deterministic_candidates_need_no_laws():
    log = logged(models(3)[0], TEXT, top=1)
    full = logged(models(3)[0], TEXT)
    parts = toy_parts(3, tree="best_first(num_nodes=3, depth=2, width=2)")
    assert [one.records for one in simulate(parts, log)] == [
        one.records for one in simulate(parts, full)
    ]


def test_a_drafter_that_fails_is_not_replayed_as_if_it_had_drafted_nothing(monkeypatch):
    parts = toy_parts(3, tree="chain(2)")

    def broken(self, blocks):
        raise RuntimeError("out of order")

    monkeypatch.setattr(type(parts.drafter.model), "extend", broken)
    with pytest.raises(UnavailableError, match="the drafter failed after 2 tokens of a text"):
        simulate(parts, logged(models(3)[0], TEXT))
