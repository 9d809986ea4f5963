"""Levels that are drawn together: the children of the builder for equal draws, and when the builder draws itself."""

import math
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch

from monge.core.context import DraftPlan
from monge.core.draws import SeededDraws
from monge.core.sampling_rules import SamplingRules, laws_from_logits
from monge.core.tree import GrowingTree
from monge.draft.level_draws import Level, draw_levels
from monge.draft.tree.fixed_width import Chain, FixedWidth
from monge.draft.tree.registry import TREES
from tests.engine import cuda_waits

VOCAB = 9


WHOLE = DraftPlan()


def levels(builder, rules, plan=WHOLE, count=5, spoilt=None, *, is_first=False):
    """First levels of several requests, whose second level is drawn next; or their roots."""
    rng = np.random.default_rng(1)
    for row in range(count):
        tree, draws = GrowingTree(0), SeededDraws(row)
        logits = torch.from_numpy(rng.normal(size=(3, VOCAB)))
        frontier = (0,)
        for _ in range(2):
            own = logits[: len(frontier)].clone()
            if spoilt is not None and row == 1:
                own[0] = spoilt
            if tree.num_nodes > 1 or builder.limits.max_depth == 1 or is_first:
                break
            laws = laws_from_logits(logits[:1], rules)
            frontier = tuple(builder.expand(tree, frontier, laws, plan, draws))
        yield (
            Level(
                tree=tree, frontier=frontier, plan=plan, draws=draws, builder=builder, rules=rules
            ),
            own,
        )


def grown(level, logits, drawn=None):
    if drawn is None:
        laws = laws_from_logits(logits, level.rules)
        nodes, draws = level.frontier, level.draws
    else:
        laws, nodes, draws = drawn.laws, tuple(drawn.tokens), drawn.tokens
        level.draws.skip(drawn.num_uniforms)
    frontier = level.builder.expand(level.tree, nodes, laws, level.plan, draws)
    finished = level.tree.finish()
    return finished.token_ids, finished.candidates, tuple(frontier), level.draws.num_drawn


@pytest.mark.parametrize(
    "builder",
    [Chain(3), FixedWidth((2, 3), "iid"), FixedWidth((3, 2)), FixedWidth((2,), "iid")],
    ids=str,
)
@pytest.mark.parametrize(
    "rules", [SamplingRules(), SamplingRules(temperature=0.7, top_k=6, top_p=0.9)], ids=str
)
@pytest.mark.parametrize("plan", [DraftPlan(), DraftPlan(max_nodes=6)], ids=["whole", "cut"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_children_are_those_of_the_builder(builder, rules, plan, device) -> None:
    expected = [grown(*level) for level in levels(builder, rules, plan)]
    together, logits = zip(*levels(builder, rules, plan), strict=True)
    logits = [rows.to(device) for rows in logits]
    with cuda_waits.counted() if device == "cuda" else nullcontext(lambda: 1) as waits:
        drawn = draw_levels(together, logits)
        assert waits() == 1
    assert any(level is not None for level in drawn)
    assert [grown(*row) for row in zip(together, logits, drawn, strict=True)] == expected


def test_levels_of_several_trees_and_rules_are_drawn_apart() -> None:
    builders = [Chain(3), FixedWidth((2, 3), "iid"), FixedWidth((2, 3)), FixedWidth((3, 3))]
    rules = [SamplingRules(), SamplingRules(temperature=0.3), SamplingRules(top_k=4), SamplingRules(temperature=0)]  # fmt: skip

    def mixture():
        every = [
            level
            for builder, own, is_first in product(builders, rules, (False, True))
            for level in levels(builder, own, count=2, is_first=is_first)
        ]
        return [every[place] for place in np.random.default_rng(0).permutation(len(every))]

    expected = [grown(*level) for level in mixture()]
    together, logits = zip(*mixture(), strict=True)
    drawn = draw_levels(together, logits)
    assert [grown(*row) for row in zip(together, logits, drawn, strict=True)] == expected
    assert 0 < drawn.count(None) < len(drawn)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_law_that_is_not_finite_is_left_to_the_builder(spoilt) -> None:
    together = levels(Chain(3), SamplingRules(), spoilt=spoilt)
    drawn = draw_levels(*zip(*together, strict=True))
    assert [one is None for one in drawn] == [False, True, False, False, False]


def test_fewer_tokens_than_are_drawn_are_left_to_the_builder() -> None:
    rules = SamplingRules(top_k=1)
    together, logits = zip(*levels(FixedWidth((3,)), rules), strict=True)
    before = [level.draws.num_drawn for level in together]
    assert draw_levels(together, logits) == [None] * 5
    assert [level.draws.num_drawn for level in together] == before


@pytest.mark.parametrize(
    ("tree", "rules"),
    [
        ("fixed_width((2, 2), 'top')", SamplingRules()),
        ("best_first", SamplingRules()),
        ("chain(2)", SamplingRules(temperature=0)),
    ],
)
def test_other_trees_are_left_to_the_builder(tree, rules) -> None:
    one = TREES.parse(tree)
    level = Level(
        tree=GrowingTree(0),
        frontier=(0,),
        plan=DraftPlan(),
        draws=SeededDraws(0),
        builder=one,
        rules=rules,
    )
    assert draw_levels([level], [torch.zeros(1, VOCAB)]) == [None]
