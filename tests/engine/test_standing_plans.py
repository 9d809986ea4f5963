"""Plans that stand for some rounds of a request alone: asked for once, and told of together, in order, and all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from monge.api import make_parts
from monge.control.base import Controller, Memory
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StepRecord
from monge.engine.batch import Batch, decode
from monge.engine.decoder import Decoder
from monge.engine.session import Session
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 5


@dataclass(frozen=True, slots=True)
class Standing(Controller[int]):
    """Plans by how many rounds it was told of; each plan stands for `num_rounds`."""

    num_rounds: int
    plans: tuple[DraftPlan, ...] = (DraftPlan(max_depth=0), DraftPlan(max_depth=1), DraftPlan(max_depth=2))
    asked: list[int] = field(default_factory=list[int])
    told: list[list[StepRecord]] = field(default_factory=list[list[StepRecord]])

    def init(self, memory: Memory) -> int:
        return 0

    def plan(self, state: int, draws: Draws) -> DraftPlan:
        self.asked.append(state)
        return self.plans[state % len(self.plans)]

    def stands(self, states: Sequence[int], plans: Sequence[DraftPlan], num_tokens: Sequence[int]) -> int:
        return self.num_rounds

    def update(self, state: int, record: StepRecord) -> int:
        return state + 1

    def update_many(self, state: int, records: Sequence[StepRecord]) -> int:
        self.told.append(list(records))
        return Controller.update_many(self, state, records)


def decoder_of(controller: Any, drafter: str = "model") -> Decoder:
    target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (1, 2))
    return Decoder(make_parts(target, None if drafter == "none" else draft, drafter=drafter, controller=controller))


def sessions_of(decoder: Decoder, *num_tokens: int) -> list[Session]:
    made = list[Session]()
    for row, count in enumerate(num_tokens):
        (request,) = decoder.requests([(1, 2, row)], max_new_tokens=count, temperature=1.0, seed=row)
        made.append(decoder.session(request))
    return made


@pytest.mark.parametrize("num_rounds", [1, 4, 100])
def test_a_plan_is_asked_for_once_and_told_of_together(num_rounds: int) -> None:
    controller = Standing(num_rounds)
    decoder = decoder_of(controller)
    (session,) = sessions_of(decoder, 30)
    list(decode([session], decoder.parts, max_batch_size=1))
    size, total = num_rounds, len(session.records)
    assert controller.asked == list(range(0, total, size))
    assert [record for told in controller.told for record in told] == session.records
    assert [len(told) for told in controller.told] == [min(size, total - done) for done in range(0, total, size)]
    room = 29
    for number, record in enumerate(session.records):
        assert record.plan.max_depth == min(number // size * size % 3, room), "a plan that stands is cut to what is wanted"
        room -= len(record.token_ids)
    assert session.untold == []


def test_what_is_told_later_is_told_before_others_join() -> None:
    controller = Standing(100)
    decoder = decoder_of(controller)
    first, second = sessions_of(decoder, 30, 6)
    batch = Batch(decoder.parts)
    batch.join([first])
    for _ in range(3):
        batch.step()
    assert controller.told == []
    assert controller.asked == [0]
    batch.join([second])
    batch.step()
    assert controller.told[0] == first.records[:3]
    assert controller.asked == [0, 3, 0], "both are planned for, by all that is known"
    assert len(controller.told) == 1, "plans of both stand"
    while second.finish_reason is None:
        batch.step()
    assert controller.told[1:] == [first.records[3:], second.records], "one has ended, so both are told of"
    batch.step()
    batch.step()
    assert controller.asked == [0, 3, 0, len(first.records) - 2], "alone again, and another plan stands"
    batch.leave(first)


def test_somebody_takes_the_place_of_another() -> None:
    """As many share the round as before, and still not the same."""
    controller = Standing(100)
    decoder = decoder_of(controller)
    first, second, third = sessions_of(decoder, 30, 30, 30)
    batch = Batch(decoder.parts)
    batch.join([first, second])
    batch.step()
    batch.step()
    batch.leave(second)
    batch.join([third])
    batch.step()
    assert controller.told == [first.records[:2]]
    assert controller.asked == [0, 0, 2, 0]
    batch.close()


def test_requests_that_draft_nothing_or_name_others_keep_plans_from_standing() -> None:
    controller = Standing(100)
    decoder = decoder_of(controller)
    sessions = sessions_of(decoder, 9, 9)
    sessions[1].drafting = "off"
    list(decode(sessions, decoder.parts, max_batch_size=2))
    assert len(controller.asked) == len(sessions[0].records)
    assert [record for told in controller.told for record in told] == sessions[0].records


@pytest.mark.parametrize("lookup_depth", [None, 0])
def test_a_round_that_was_looked_up_in_is_told_of_at_once(lookup_depth: int | None) -> None:
    """Where a lookup drafts, and where it is kept from it and followed."""
    plan = DraftPlan(max_depth=2, lookup_depth=lookup_depth, follows=True)
    controller = Standing(100, plans=(plan,))
    decoder = decoder_of(controller, drafter="pool('ngram', 'model')")
    (session,) = sessions_of(decoder, 40)
    list(decode([session], decoder.parts, max_batch_size=1))
    assert [record for told in controller.told for record in told] == session.records
    looked = [[bool(record.hindsight) or record.drafter == "ngram" for record in told] for told in controller.told]
    assert all(told[-1] and not any(told[:-1]) for told in looked[:-1])
    assert max(map(len, looked)) > 1
    assert len(looked) > 2


@dataclass(frozen=True, slots=True)
class Choosy(Standing):
    """Wants to know at once of looked-up drafts that were refused."""

    def is_news(self, state: int, record: StepRecord) -> bool:
        return record.drafter == "ngram" and record.num_accepted == 0


def test_a_controller_says_what_is_news() -> None:
    controller = Choosy(100, plans=(DraftPlan(max_depth=1, lookup_depth=2, follows=True),))
    decoder = decoder_of(controller, "pool('ngram', 'model')")
    (session,) = sessions_of(decoder, 80)
    list(decode([session], decoder.parts, max_batch_size=1))
    assert [record for told in controller.told for record in told] == session.records
    news = [[record.drafter == "ngram" and not record.num_accepted for record in told] for told in controller.told]
    assert all(told[-1] and not any(told[:-1]) for told in news[:-1])
    assert len(news) > 2
    assert any(record.drafter == "ngram" for told in controller.told for record in told[:-1]), "the others wait"


def test_nobody_plans_where_nothing_can_be_drafted() -> None:
    controller = Standing(1)
    decoder = decoder_of(controller, drafter="none")
    (session,) = sessions_of(decoder, 12)
    list(decode([session], decoder.parts, max_batch_size=1))
    assert session.drafting == "off"
    assert (controller.asked, controller.told, session.untold) == ([], [], [])
    assert [record.plan for record in session.records] == [DraftPlan(max_depth=0)] * 12


def test_a_request_that_leaves_is_no_hindrance_to_others() -> None:
    controller = Standing(100)
    decoder = decoder_of(controller)
    first, second = sessions_of(decoder, 30, 6)
    batch = Batch(decoder.parts)
    batch.join([first])
    batch.step()
    batch.leave(first)
    batch.join([second])
    while second.finish_reason is None:
        batch.step()
    assert [record for told in controller.told for record in told] == second.records


@dataclass(frozen=True, slots=True)
class Refusing(Standing):
    """Cannot be told of rounds of texts that begin with some token."""

    refused: int = 0

    def init(self, memory: Memory) -> int:
        return 0

    def update_many(self, state: int, records: Sequence[StepRecord]) -> int:
        if records[0].context_length == self.refused:
            raise RuntimeError("these rounds are refused")
        return Standing.update_many(self, state, records)


@pytest.mark.parametrize("isolated", [True, False])
def test_who_cannot_be_told_of_ends_alone(isolated: bool) -> None:
    """As others join: what was told later is told then, and raises then."""
    controller = Refusing(100, refused=3)
    decoder = decoder_of(controller)
    (first,) = sessions_of(decoder, 30)
    (request,) = decoder.requests([(1, 2, 3, 4)], max_new_tokens=6, temperature=1.0, seed=1)
    second = decoder.session(request)
    batch = Batch(decoder.parts, isolated=isolated)
    batch.join([first])
    batch.step()
    batch.step()
    batch.join([second])
    if not isolated:
        with pytest.raises(RuntimeError, match="these rounds are refused"):
            batch.step()
        batch.close()
        return
    batch.step()
    assert first.finish_reason == "error"
    assert len(first.records) == 2
    while second.finish_reason is None:
        batch.step()
    assert second.finish_reason == "length"
    assert [record for told in controller.told for record in told] == second.records
