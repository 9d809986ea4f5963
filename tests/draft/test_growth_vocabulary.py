"""Trees of a network over some of the target's tokens, and of one whose logits are no numbers at some nodes."""

import pytest
import torch

from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.draft.growth import TreeExpansion
from monge.draft.model import Model
from monge.draft.tree.registry import TREES
from monge.laws.draws import SeededDraws
from monge.oracle.tabular import RandomTable, TabularModel

IDS = torch.tensor([1, 4, 5, 9])
VOCAB = 11


def growth(rules, draft_ids):
    return TreeExpansion(
        context=Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=rules),
        plan=DraftPlan(),
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


@pytest.mark.parametrize("tree", ["fixed_width((2, 2), 'top')", "paths(4, 3)"])
def test_nodes_without_a_law_have_no_children(tree):
    class NotFinite(TabularModel):
        def extend(self, blocks):
            logits = super().extend(blocks)
            logits[0][torch.tensor(blocks[0].token_ids) == 1] = float("nan")
            return logits

    drafter = Model(model=NotFinite(RandomTable(2, 23), 2), tree=TREES.parse(tree))
    context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=SamplingRules())
    states = drafter.open([context])
    with pytest.warns(UserWarning, match="draft model, request 0: logits are not finite"):
        (draft,) = drafter.draft([context], states, [DraftPlan()], [SeededDraws(0)])
    drawn = draft.tree
    first = [node for node in range(1, drawn.num_nodes) if drawn.depths[node] == 1]
    assert {drawn.token_ids[node]: bool(drawn.candidates[node]) for node in first} == {
        0: True,
        1: False,
    }
