"""Drafters that read the text themselves are told of rounds that they had a part in, and of no others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from monge.api import make_parts
from monge.control.base import PLAIN, Controller, Memory
from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StageTimes, StepRecord, Verdict
from monge.draft.base import Draft
from monge.draft.model import ModelDrafter
from monge.draft.ngram import NgramDrafter
from monge.draft.pool import PoolDrafter
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 5
FOLLOWS = DraftPlan(max_depth=0, lookup_depth=0, follows=True)
DRAFTS = DraftPlan(max_depth=2, lookup_depth=0)


@dataclass(frozen=True, slots=True)
class Script(Controller[int]):
    """The same plans over and over."""

    plans: tuple[DraftPlan, ...]

    def init(self, memory: Memory) -> int:
        return 0

    def plan(self, state: int, draws: Draws) -> DraftPlan:
        return self.plans[state % len(self.plans)]

    def update(self, state: int, record: StepRecord) -> int:
        return state + 1


def decoder_of(drafter: str, plans: tuple[DraftPlan, ...], *, reads_text: bool | None = None) -> Decoder:
    target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (1, 2))
    parts = make_parts(target, draft if "model" in drafter else None, drafter=drafter, controller=Script(plans))
    if reads_text is not None:
        object.__setattr__(parts, "reads_text", reads_text)
    return Decoder(parts)


def written(decoder: Decoder, prompts: list[tuple[int, ...]]) -> Any:
    results = decoder.generate(prompts, max_new_tokens=60, temperature=1.0, seed=7)
    untimed = [[replace(record, times=StageTimes()) for record in result.records] for result in results]
    return [result.token_ids for result in results], untimed


@pytest.mark.parametrize("prompts", [[(1, 2, 1, 2)], [(1, 2, 1, 2), (3, 4), (0, 1)]], ids=len)
@pytest.mark.parametrize(
    ("drafter", "plans"),
    [
        ("model", (DRAFTS, PLAIN, PLAIN)),
        ("ngram", (DraftPlan(max_depth=3), PLAIN)),
        ("pool('ngram', 'model')", (FOLLOWS, PLAIN, PLAIN, PLAIN, DRAFTS)),
        ("pool('ngram', 'model')", (FOLLOWS, DraftPlan(max_depth=4), PLAIN, PLAIN)),
    ],
)
def test_texts_and_records_are_what_they_are_where_all_is_told(drafter, plans, prompts):
    told, untold = (decoder_of(drafter, plans, reads_text=flag) for flag in (False, None))
    assert untold.parts.reads_text
    expected = written(told, prompts)
    assert written(untold, prompts) == expected
    if "pool" in drafter:
        found = [entry for records in expected[1] for record in records for entry in record.hindsight]
        assert len(found) > 3, "what would have been looked up was followed through rounds that nobody drafted in"
        assert len({(one.position, one.drafter) for one in found}) == len(found) or len(prompts) > 1, "and said once"


@pytest.mark.parametrize(("kind", "drafter"), [(ModelDrafter, "model"), (NgramDrafter, "ngram")])
def test_plain_rounds_are_not_told(kind, drafter, monkeypatch):
    lengths, observe = [], kind.observe

    def noted(self, contexts: Sequence[Context], drafts: Sequence[Draft[Any]], verdicts: Sequence[Verdict]) -> Sequence[Any]:
        lengths.append(len(contexts[0].token_ids))
        return observe(self, contexts, drafts, verdicts)

    monkeypatch.setattr(kind, "observe", noted)
    _, (records,) = written(decoder_of(drafter, (DRAFTS, PLAIN, PLAIN)), [(1, 2, 1, 2)])
    expected = [one.context_length + len(one.token_ids) for one in records if one.plan.max_depth]
    assert lengths == expected
    assert len(expected) < len(records)


RESTS = DraftPlan(max_depth=0, lookup_depth=3, follows=True)


@pytest.mark.parametrize(
    "members", [("ngram(min_ngram=3)", "ngram(min_ngram=2)", "model"), ("model", "none", "ngram(min_ngram=3)")]
)
@pytest.mark.parametrize("plans", [(RESTS,), (RESTS, RESTS, DRAFTS, FOLLOWS, RESTS)], ids=len)
def test_rounds_in_which_nothing_is_looked_up_are_what_they_are_in_full(members, plans, monkeypatch):
    drafter = f"pool{members}"
    short, looked_up = list[bool](), PoolDrafter.looked_up

    def noted(self, context, state, plan):
        found = looked_up(self, context, state, plan)
        short.append(found is not None)
        return found

    monkeypatch.setattr(PoolDrafter, "looked_up", noted)
    made = written(decoder_of(drafter, plans), [(1, 2, 3, 4)])
    assert 3 < sum(short) < len(short), "some find nothing, some find something"
    monkeypatch.setattr(PoolDrafter, "looked_up", lambda *_: None)
    assert made == written(decoder_of(drafter, plans), [(1, 2, 3, 4)])


def test_what_has_been_read_of_the_text_is_kept_where_nothing_is_found(monkeypatch):
    behind, draft = list[int](), NgramDrafter.draft

    def noted(self, contexts, states, plans, draws):
        behind.append(len(contexts[0].token_ids) - len(states[0]) // 8)
        return draft(self, contexts, states, plans, draws)

    monkeypatch.setattr(NgramDrafter, "draft", noted)
    written(decoder_of("pool('ngram(min_ngram=3)', 'model')", (RESTS,)), [(1, 2, 3, 4)])
    assert len(behind) > 20
    assert max(behind) <= 4, "the tokens of one round"


@pytest.mark.parametrize(
    "plan", [RESTS, FOLLOWS, DraftPlan(max_depth=2, drafter="model")], ids=["asked", "followed", "beside a network"]
)
def test_a_lookup_that_fails_costs_its_request_the_speculation(plan, monkeypatch):
    decoder = decoder_of("pool('ngram', 'model')", (plan,))

    def fail(*_):
        raise KeyError("its own fault")

    monkeypatch.setattr(NgramDrafter, "draft", fail)
    with pytest.warns(UserWarning, match="the drafter failed"):
        ((tokens,), (records,)) = written(decoder, [(1, 2, 1, 2)])
    assert len(tokens) == 60
    assert not any(record.depth for record in records)
