"""Limits of the model-free drafters of a pool."""

from dataclasses import dataclass
from typing import Any

import pytest

from monge.api import make_components
from monge.control.base import RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StepRecord
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel


@dataclass(frozen=True, slots=True)
class Limited(SoloController[None]):
    """The same limits every round."""

    limits: DraftPlan

    def init(self, shared: SharedState) -> None:
        return None

    def plan_one(
        self, state: None, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        return self.limits

    def update(self, state: None, record: StepRecord) -> None:
        return None


def limited(**limits: Any) -> tuple[StepRecord, ...]:
    """Records of a text that repeats itself."""
    # So that drafts are accepted to any depth.
    target, draft = (TabularModel(RandomTable(3, 1), 3) for _ in range(2))
    parts = make_components(
        target,
        draft,
        drafter="pool('ngram', 'model')",
        tree="chain(4)",
        controller=Limited(DraftPlan(**limits)),
    )
    (result,) = Decoder(parts).generate(
        [(0, 1, 2, 0, 1)], max_new_tokens=80, temperature=1.0, seed=1
    )
    return result.records[:-8]  # the room for tokens shortens the last ones


@pytest.mark.parametrize(
    ("limits", "looked_up", "modelled"),
    [
        ({"max_depth": 3}, 3, 3),
        ({"max_depth": 2, "model_free_depth": 5}, 5, 2),
        ({"max_depth": 3, "model_free_depth": 0}, 0, 3),
        ({"max_depth": 0, "model_free_depth": 2}, 2, 0),
        ({"max_depth": 0}, 0, 0),
    ],
    ids=str,
)
def test_lookups_may_have_a_limit_of_their_own(
    limits: dict[str, int], looked_up: int, modelled: int
) -> None:
    records = limited(**limits)
    deepest = {
        name: max((one.depth for one in records if one.drafter == name), default=0)
        for name in ("ngram", "model")
    }
    assert deepest["ngram"] == looked_up
    assert deepest["model"] in {0, modelled}
    if not looked_up:
        assert {one.depth for one in records} == {modelled}
    assert not any(one.counterfactuals for one in records)
