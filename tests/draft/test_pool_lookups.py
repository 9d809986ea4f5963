"""What a pool does with its lookups: their limits, what is followed of them, and what is kept of a look in vain."""

from array import array
from dataclasses import dataclass, replace
from typing import Any

import pytest

from monge.api import make_parts
from monge.control.base import Controller, Memory
from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import lone_root
from monge.core.verdict import StepRecord
from monge.draft.base import Draft
from monge.draft.pool import PoolDrafter
from monge.draft.pool_state import NO_DRAWS, PoolState
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 5


@dataclass(frozen=True, slots=True)
class Limited(Controller[None]):
    """The same limits every round."""

    limits: DraftPlan

    def init(self, memory: Memory) -> None:
        return None

    def plan(self, state: None, draws: Draws) -> DraftPlan:
        return self.limits

    def update(self, state: None, record: StepRecord) -> None:
        return None


def limited(**limits: Any) -> tuple[StepRecord, ...]:
    """Records of a text that repeats itself."""
    target, draft = (TabularModel(RandomTable(3, 1), 3) for _ in range(2))  # so that drafts are accepted to any depth
    parts = make_parts(
        target, draft, drafter="pool('ngram', 'model')", tree="chain(4)", controller=Limited(DraftPlan(**limits))
    )
    (result,) = Decoder(parts).generate([(0, 1, 2, 0, 1)], max_new_tokens=80, temperature=1.0, seed=1)
    return result.records[:-8]  # the room for tokens shortens the last ones


@pytest.mark.parametrize(
    ("limits", "looked_up", "modelled"),
    [
        ({"max_depth": 3}, 3, 3),
        ({"max_depth": 2, "lookup_depth": 5}, 5, 2),
        ({"max_depth": 3, "lookup_depth": 0}, 0, 3),
        ({"max_depth": 0, "lookup_depth": 2}, 2, 0),
        ({"max_depth": 0}, 0, 0),
    ],
    ids=str,
)
def test_lookups_may_have_a_limit_of_their_own(limits: dict[str, int], looked_up: int, modelled: int) -> None:
    records = limited(**limits)
    deepest = {name: max((one.depth for one in records if one.drafter == name), default=0) for name in ("ngram", "model")}
    assert deepest["ngram"] == looked_up
    assert deepest["model"] in {0, modelled}
    if not looked_up:
        assert {one.depth for one in records} == {modelled}
    assert not any(one.hindsight for one in records)


@pytest.mark.parametrize("max_depth", [3, 0])
def test_what_is_kept_from_drafting_can_be_followed(max_depth: int) -> None:
    """It is what a plan that names the other drafter sees, but for places where nothing was found."""
    records = limited(max_depth=max_depth, lookup_depth=0, follows=True)
    named = limited(max_depth=max_depth, drafter="model")
    assert [one.token_ids for one in records] == [one.token_ids for one in named]
    seen = [entry for one in records for entry in one.hindsight]
    assert len(seen) > 5
    positions = {entry.position: entry for one in named for entry in one.hindsight if entry.num_nodes}
    assert all(positions.get(entry.position, entry) == entry for entry in seen)
    assert {entry.position for entry in seen} == set(positions)


def test_what_was_looked_up_in_vain_is_kept_for_its_own_round_only() -> None:
    """A round that looked up and ran in another way than as one must not bring back what was known then."""
    models = [TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (1, 2)]
    pool = make_parts(*models, drafter="pool('ngram(min_ngram=3)', 'model')", tree="chain(2)").drafter
    assert isinstance(pool, PoolDrafter)
    context = Context(request_id=0, token_ids=(0, 1, 2, 3), num_prompt_tokens=4, rules=SamplingRules())
    (state,) = pool.open([context])
    longer, asked, network = context.append((4,)), DraftPlan(max_depth=2), Draft(lone_root(4), None)
    assert not pool.proposes(longer, state, asked, 1)
    kept = pool.chained(longer, state, asked, 1, network).state
    assert array("q", kept.states[0]).tolist() == [0, 1, 2, 3, 4], "the text has been read to its end"
    assert not pool.proposes(longer, state, asked, 1)
    blind = DraftPlan(max_depth=2, lookup_depth=0)
    assert pool.chained(longer.append((0,)), kept, blind, 1, network).state.states is kept.states


def test_lookups_that_have_not_read_the_prompt_are_asked_by_the_pool_itself() -> None:
    """A prompt that was not read when the request began is shown to them with the first draft that asks for it."""
    models = [TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (1, 2)]
    pool = make_parts(*models, drafter="pool('ngram', 'model')").drafter
    assert isinstance(pool, PoolDrafter)
    context = Context(request_id=0, token_ids=(0, 1, 0, 1, 0), num_prompt_tokens=5, rules=SamplingRules())
    (state,) = pool.open([replace(context, token_ids=(0,))])
    follows = DraftPlan(max_depth=0, lookup_depth=0, follows=True)
    assert pool.looked_up(context, state, follows) is None
    (draft,) = pool.draft([context], [state], [follows], [NO_DRAWS])
    assert draft.state.watched
    read = PoolState(draft.state.states)
    known = pool.looked_up(context, read, follows)
    assert known is not None
    assert known.watched == draft.state.watched
