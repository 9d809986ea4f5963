"""A network over some of the target's tokens drafts what it would over all, with none of the others."""

import pytest
import torch

from monge.core.context import Context, DraftPlan
from monge.core.draws import SeededDraws
from monge.core.sampling_rules import SamplingRules
from monge.draft.growth import TreeExpansion
from monge.draft.tree.registry import TREES

IDS = torch.tensor([1, 4, 5, 9])
VOCAB = 11


def growth(rules, draft_ids):
    return TreeExpansion(
        context=Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=rules),
        plan=DraftPlan(min_token_prob=0.0),
        draws=SeededDraws(3),
        builder=TREES.parse("fixed_width((3,), 'without_replacement')"),
        rules=rules,
        network="test",
        draft_ids=draft_ids,
    )


@pytest.mark.parametrize(
    "rules",
    [
        SamplingRules(temperature=1),
        SamplingRules(temperature=0.5, top_k=3),
        SamplingRules(temperature=0),
    ],
    ids=str,
)
def test_trees_are_equal(rules):
    logits = torch.randn(1, len(IDS), generator=torch.Generator().manual_seed(0))
    wide = torch.full((1, VOCAB), -torch.inf).index_copy(1, IDS, logits)
    narrow, whole = growth(rules, IDS), growth(rules, None)
    narrow.grow(logits)
    whole.grow(wide)
    assert narrow.draft(None).tree.token_ids == whole.draft(None).tree.token_ids
    assert narrow.token_probs == whole.token_probs
