"""Rounds as one of a pool's draft model: those in which no lookup in front of it drafts."""

import pytest

from monge.control.base import Controller
from monge.core.context import DraftPlan
from monge.draft.ngram import NgramDrafter
from tests.engine.rounds import RULES, both, num_whole, with_programs, written
from tests.engine.tiny import prompts


class Modelled(Controller):
    """The draft model drafts; what else would have been is followed."""

    def init(self, memory):
        return None

    def plan(self, state, draws):
        return DraftPlan(max_depth=3, lookup_depth=0, follows=True)

    def update(self, state, record):
        return None


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("pool", ["pool('ngram', 'model')", "pool('model', 'ngram')", "pool('none', 'ngram', 'model')"])
def test_in_a_pool_the_draft_model_runs_as_one_where_nobody_in_front_of_it_drafts(pool, rules):
    plain, whole, programs = both(drafter=pool, tree="chain(3)")
    options = {"max_new_tokens": 120, **rules}
    assert written(whole, **options) == written(plain, **options)
    assert num_whole(programs) > 5
    (result,) = whole.generate(list(prompts((9,), seed=5)), seed=3, ignore_eos=True, **options)
    assert all(record.drafter == "model" for record in result.records if record.as_one)


@pytest.mark.parametrize("longest_text", [2, 4, 32])
def test_behind_what_was_looked_up_rounds_run_as_one_up_to_the_longest_text_that_their_program_reads(longest_text):
    plain, whole, programs = both(drafter="pool('ngram', 'model')", tree="chain(3)")
    for program in programs.values():
        program.longest_text = longest_text
    whole = with_programs(plain, programs)
    options = {"max_new_tokens": 120, "temperature": 0.0}
    assert written(whole, **options) == written(plain, **options)
    longest = max(programs[True].num_unread)
    assert longest <= longest_text
    assert longest > min(longest_text, 8) // 2, "it had reason to"


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_what_would_have_been_looked_up_is_followed_through_rounds_as_one(rules):
    hindsight = []
    for decoder in both(drafter="pool('ngram', 'model')", tree="chain(3)", controller=Modelled())[:2]:
        (result,) = decoder.generate(list(prompts((9,), seed=5)), seed=3, ignore_eos=True, max_new_tokens=120, **rules)
        hindsight.append([record.hindsight for record in result.records])
    assert hindsight[0] == hindsight[1]
    assert any(hindsight[0])


def test_a_lookup_that_keeps_a_round_from_running_as_one_is_asked_once(monkeypatch):
    asked, draft = [], NgramDrafter.draft

    def noted(drafter, contexts, *rest):
        asked.append(len(contexts[0].token_ids))
        return draft(drafter, contexts, *rest)

    monkeypatch.setattr(NgramDrafter, "draft", noted)
    _, whole, programs = both(drafter="pool('ngram', 'model')", tree="chain(3)")
    (result,) = whole.generate(list(prompts((9,), seed=5)), seed=3, ignore_eos=True, max_new_tokens=120, temperature=0.0)
    assert num_whole(programs) > 5
    looked_up = [record.context_length for record in result.records if record.drafter == "ngram"]
    assert len(looked_up) > 5
    assert {asked.count(length) for length in looked_up} == {1}
