"""Levels that are drawn together: the children of the builder for equal draws, and when the builder draws itself."""

import math
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch

from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.draft.growth import TreeExpansion, draw_frontiers
from monge.draft.tree.fixed_width import Chain, FixedWidth
from monge.draft.tree.registry import TREES
from monge.laws.draws import SeededDraws, num_drawn
from tests.engine import cuda_waits

VOCAB = 9


WHOLE = DraftPlan()


def expansion(row, builder, rules, plan=WHOLE):
    context = Context(request_id=row, token_ids=(0,), num_prompt_tokens=1, rules=rules)
    draws = SeededDraws(row)
    return TreeExpansion(
        context=context, plan=plan, draws=draws, builder=builder, rules=rules, network="table"
    )


def levels(
    builder, rules, plan=WHOLE, count=5, spoilt=None, *, first=0, is_first=False, draft_ids=None
):
    """First levels of several requests, whose second level is drawn next; or their roots."""
    rng = np.random.default_rng(1)
    for row in range(count):
        level = expansion(first + row, builder, rules, plan)
        level.draft_ids = draft_ids
        logits = torch.from_numpy(rng.normal(size=(3, VOCAB)))
        if not is_first and builder.limits.max_depth > 1:
            level.grow(logits[:1])
        own = logits[: len(level.frontier)].clone()
        if spoilt is not None and row == 1:
            own[0] = spoilt
        yield level, own


def grown(level, logits, drawn=None):
    level.grow(logits, drawn)
    finished = level.tree.finish()
    return finished.token_ids, finished.candidates, level.frontier, num_drawn(level.draws)


def drawn_together(every):
    """Draw levels together; return them, and what grows from them."""
    logits = {level.request_id: own for level, own in every}
    drawn = draw_frontiers([level for level, _ in every], logits)
    return drawn, lambda: [grown(level, own, drawn.get(level.request_id)) for level, own in every]


@pytest.mark.parametrize(
    "builder",
    [Chain(3), FixedWidth((2, 3), "iid"), FixedWidth((3, 2)), FixedWidth((2,), "iid")],
    ids=str,
)
@pytest.mark.parametrize(
    "rules", [SamplingRules(), SamplingRules(temperature=0.7, top_k=6, top_p=0.9)], ids=str
)
@pytest.mark.parametrize("plan", [DraftPlan(), DraftPlan(max_nodes=6)], ids=["whole", "cut"])
@pytest.mark.parametrize("draft_ids", [None, torch.arange(1, 2 * VOCAB, 2)], ids=["all", "some"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_children_are_those_of_the_builder(builder, rules, plan, draft_ids, device) -> None:
    expected = [grown(*level) for level in levels(builder, rules, plan, draft_ids=draft_ids)]
    draft_ids = None if draft_ids is None else draft_ids.to(device)
    own = levels(builder, rules, plan, draft_ids=draft_ids)
    every = [(level, rows.to(device)) for level, rows in own]
    with cuda_waits.counted() if device == "cuda" else nullcontext(lambda: 1) as waits:
        drawn, grow = drawn_together(every)
        assert waits() == 1
    assert len(drawn) > 0
    assert grow() == expected


def test_levels_of_several_trees_and_rules_are_drawn_apart() -> None:
    builders = [Chain(3), FixedWidth((2, 3), "iid"), FixedWidth((2, 3)), FixedWidth((3, 3))]
    rules = [SamplingRules(), SamplingRules(temperature=0.3), SamplingRules(top_k=4), SamplingRules(temperature=0)]  # fmt: skip

    def mixture():
        every = [
            level
            for number, given in enumerate(product(builders, rules, (False, True)))
            for level in levels(*given[:2], count=2, first=2 * number, is_first=given[2])
        ]
        return [every[place] for place in np.random.default_rng(0).permutation(len(every))]

    expected = [grown(*level) for level in mixture()]
    every = mixture()
    drawn, grow = drawn_together(every)
    assert grow() == expected
    # Wide trees at temperature 0 are left to the builder.
    assert len(drawn) == len(every) - 3 * 2 * 2


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_law_that_is_not_finite_is_left_to_the_builder(spoilt) -> None:
    drawn, _ = drawn_together([*levels(Chain(3), SamplingRules(), spoilt=spoilt)])
    assert [*drawn] == [0, 2, 3, 4]


def test_fewer_tokens_than_are_drawn_are_left_to_the_builder() -> None:
    rules = SamplingRules(top_k=1)
    every = [*levels(FixedWidth((3,)), rules)]
    assert drawn_together(every)[0] == {}
    assert [num_drawn(level.draws) for level, _ in every] == [0] * 5


@pytest.mark.parametrize(
    ("tree", "rules"),
    [
        ("fixed_width((2, 2), 'top')", SamplingRules()),
        ("best_first", SamplingRules()),
        ("fixed_width((2, 2))", SamplingRules(temperature=0)),
    ],
)
def test_other_trees_are_left_to_the_builder(tree, rules) -> None:
    level = expansion(0, TREES.parse(tree), rules)
    assert drawn_together([(level, torch.zeros(1, VOCAB))])[0] == {}
