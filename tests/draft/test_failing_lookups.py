"""Model-free drafters of a pool that fail."""

from dataclasses import dataclass

import pytest

from monge.api import make_components
from monge.control.base import RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StepRecord
from monge.draft.ngram import NgramDrafter
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 5
LOOKS_UP = DraftPlan(max_depth=0, model_free_depth=3)
NAMES = DraftPlan(max_depth=2, drafter="model")


@dataclass(frozen=True, slots=True)
class Script(SoloController[int]):
    """The same plans over and over."""

    plans: tuple[DraftPlan, ...]

    def init(self, shared: SharedState) -> int:
        return 0

    def plan_one(self, state: int, info: RoundInfo, context_length: int, draws: Draws) -> DraftPlan:
        return self.plans[state % len(self.plans)]

    def update(self, state: int, record: StepRecord) -> int:
        return state + 1


def decoder_of(drafter: str, plan: DraftPlan) -> Decoder:
    target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (1, 2))
    return Decoder(
        make_components(
            target,
            draft if "model" in drafter else None,
            drafter=drafter,
            controller=Script((plan,)),
        )
    )


@pytest.mark.parametrize("plan", [LOOKS_UP, NAMES], ids=["asked", "shadow"])
def test_a_lookup_that_fails_costs_its_request_the_speculation(plan, monkeypatch):
    def fail(*_):
        raise KeyError("its own fault")

    monkeypatch.setattr(NgramDrafter, "draft", fail)
    with pytest.warns(UserWarning, match="the drafter failed"):
        (result,) = decoder_of("pool('ngram', 'model')", plan).generate(
            [(1, 2, 1, 2)], max_new_tokens=60, temperature=1.0, seed=7
        )
    assert len(result.token_ids) == 60
    assert not any(record.depth for record in result.records)
