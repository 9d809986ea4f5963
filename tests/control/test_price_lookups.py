"""`price` with a pool: drafters without a network draft where their candidates are worth more than a network's."""

from typing import Any

import pytest

from monge.api import make_parts
from monge.control.base import Memory
from monge.control.cost_model import CostModel
from monge.control.price import Price
from monge.control.price_memory import pooled_of
from monge.core.context import DraftPlan
from monge.core.selection import Member
from monge.core.verdict import StepRecord
from monge.engine.decoder import Decoder
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from tests.control.lookup_scripts import MEMBERS, follow
from tests.control.scripts import chain_round, draws


def memory_of(*, draft: float = 0.1, node: float = 0.02, members: tuple[Member, ...] = MEMBERS) -> Memory:
    return Memory(CostModel.linear(plain=1.0, node=node, draft=draft), members=members)


def lookup_depths(plans: list[DraftPlan]) -> list[int | None]:
    return [plan.lookup_depth for plan in plans]


def test_what_is_accepted_is_looked_up_ever_deeper() -> None:
    controller = Price()
    plans, _ = follow(controller, controller.init(memory_of()), 12, found=True, looked=8, modelled=0)
    assert plans[0].lookup_depth is not None
    assert plans[0].lookup_depth >= 1
    assert plans[-1].lookup_depth == 8


def test_what_is_refused_is_left_to_the_network_and_followed_until_it_would_be_accepted() -> None:
    controller = Price()
    plans, state = follow(controller, controller.init(memory_of()), 12, found=True, looked=0, modelled=3)
    assert lookup_depths(plans)[-4:] == [0] * 4
    assert all(plan.max_depth for plan in plans)
    plans, _ = follow(controller, state, 12, found=True, looked=8, modelled=3, context=200)
    assert (lookup_depths(plans)[-1] or 0) > 3


def test_a_request_goes_by_what_others_had_until_its_own_text_says_otherwise() -> None:
    controller, memory = Price(), memory_of()
    follow(controller, controller.init(memory), 30, found=True, looked=0, modelled=3)
    plans, state = follow(controller, controller.init(memory), 6, found=True, looked=0, modelled=3)
    assert lookup_depths(plans) == [0] * 6
    assert all(plan.follows for plan in plans)
    plans, _ = follow(controller, state, 12, found=True, looked=8, modelled=3, context=200)
    assert (lookup_depths(plans)[-1] or 0) > 3


def test_lookups_say_nothing_about_the_network() -> None:
    controller, memory = Price(), memory_of()
    _, state = follow(controller, controller.init(memory), 40, found=True, looked=8, modelled=0)
    assert state.counts.reached == ()
    assert pooled_of(memory).counts.reached == ()
    assert pooled_of(memory).looked.accepted[0] > 5
    assert pooled_of(memory).speed > 2.0, "but a second is worth as much as they make of it"


def test_lookups_go_on_while_the_network_rests() -> None:
    controller, memory = Price(), memory_of(draft=0.6)
    _, state = follow(controller, controller.init(memory), 30, found=False, looked=0, modelled=0)
    assert state.off_left > 0
    plans, state = follow(controller, state, 8, found=True, looked=8, modelled=0, context=300)
    resting = [plan for plan in plans if plan.max_depth == 0]
    assert resting
    assert (resting[-1].lookup_depth or 0) > 1


def test_a_trial_is_about_the_network() -> None:
    controller, memory = Price(), memory_of(draft=0.6)
    state, trials = controller.init(memory), 0
    for context in range(40, 160):
        plan = controller.plan(state, draws())
        trials += state.trial_left > 0
        assert state.trial_left == 0 or plan.lookup_depth == 0
        record = chain_round(plan.depth(3), 0, plan=plan, drafter="model" if plan.depth(3) else None, context_length=context)
        state = controller.update(state, record)
    assert trials >= 2


@pytest.mark.parametrize(
    "members",
    [
        (),
        MEMBERS[:1],
        (Member(name="ngram", max_depth=8, runs_network=False), Member(name="none", max_depth=0, runs_network=False)),
        MEMBERS[::-1],
    ],
    ids=["no pool", "one lookup", "lookups alone", "the network first"],
)
def test_without_a_choice_nothing_is_said_of_lookups(members: tuple[Member, ...]) -> None:
    controller, memory = Price(), memory_of(members=members)
    state = controller.init(memory)
    for _ in range(20):
        plan = controller.plan(state, draws())
        assert plan.lookup_depth is None
        state = controller.update(state, chain_round(plan.depth(3), 3, plan=plan))


def test_in_a_batch_the_better_one_drafts() -> None:
    controller, memory = Price(), memory_of()
    _, good = follow(controller, controller.init(memory), 12, found=True, looked=8, modelled=1)
    _, bad = follow(controller, controller.init(memory), 12, found=True, looked=0, modelled=3)
    assert memory.costs is not None
    memory.costs.batch_size = 2
    plans = controller.plan_many([good, bad], [draws(), draws()])
    assert {plan.max_depth for plan in plans} != {0}
    assert plans[0].lookup_depth == plans[0].max_depth
    assert plans[1].lookup_depth == 0
    assert all(plan.follows for plan in plans), "a neighbour's text may begin to repeat itself too"


def pool_parts(pool: str, seed: int = 11, vocab: int = 3) -> Any:
    models = TabularModel(RandomTable(vocab, seed), vocab), TabularModel(RandomTable(vocab, seed + 12), vocab)
    costs = CostModel.linear(plain=1.0, node=0.1, draft=0.2)
    return make_parts(*models, drafter=pool, tree="chain(2)", controller="price(first_off=1)", costs=costs)


@pytest.mark.parametrize(
    "pool", ["pool('ngram(2)', 'model')", "pool('model', 'ngram(2)')", "pool('none', 'ngram(2)', 'model')"]
)
def test_the_law_is_the_targets(pool: str) -> None:
    """Every draw enumerated, over rounds that were planned from the outcome of those before."""
    case = Case(prompt=(0, 1, 0), horizon=2, max_new_tokens=3)
    target = TabularModel(RandomTable(3, 11), 3)
    assert law_error(output_law(lambda: pool_parts(pool), case), target_law(target, case)) < 1e-12


def records_of(pool: str, **settings: Any) -> tuple[StepRecord, ...]:
    vocab = 5
    models = TabularModel(RandomTable(vocab, 3), vocab), TabularModel(RandomTable(vocab, 4), vocab)
    costs = CostModel.linear(plain=1.0, node=0.02, draft=0.1)
    parts = make_parts(*models, drafter=pool, tree="chain(8)", controller="price", costs=costs)
    (result,) = Decoder(parts).generate([(0, 1, 2, 0, 1)], max_new_tokens=160, **settings)
    return result.records


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    """A greedy text of a target that looks at one token soon goes round in circles."""
    records = records_of("pool('ngram(min_ngram=2)', 'model')", temperature=0.0)
    late = [record.drafter for record in records[len(records) // 2 :]]
    assert late.count("ngram") > 0.8 * len(late)


def test_a_text_that_does_not_is_left_to_the_network() -> None:
    records = records_of("pool('ngram(min_ngram=1)', 'model')", temperature=1.0, seed=0)
    drafters = [record.drafter for record in records if record.depth]
    assert "model" in drafters
    looked = [record for record in records if record.drafter == "ngram"]
    assert len(looked) < len(drafters)
    assert any(entry.drafter == "ngram" for record in records for entry in record.hindsight), "it is followed meanwhile"
