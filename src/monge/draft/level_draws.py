"""Draws a level of many trees on a device, with a single wait of the host.

Node by node, it would wait for every law and for every token of every request.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.context import DraftPlan
from monge.core.draws import Draws, can_peek
from monge.core.law import Law, trusted_law
from monge.core.sampling_rules import SamplingRules, probs_from_logits, rule_rows
from monge.core.tree import DrawnTokens, GrowingTree
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.fixed_width import LevelTree


@dataclass(slots=True, kw_only=True)
class Level:
    """A level of a tree whose children are drawn next.

    Args:
        plan: Limits of the tree.
        draws: Randomness of the request.
        builder: Shapes the tree.
        rules: How logits become draft laws.
        frontier: Nodes whose children are drawn.
        tree: The tree so far.
    """

    plan: DraftPlan
    draws: Draws
    builder: TreeBuilder
    rules: SamplingRules
    frontier: tuple[int, ...] = (0,)
    tree: GrowingTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnLevel:
    """The children of a level, drawn already.

    Args:
        laws: Draft laws of the nodes that get children.
        tokens: Children of each of them.
        num_uniforms: Uniforms of the request's draws that they take.
    """

    laws: Sequence[Law]
    tokens: DrawnTokens
    num_uniforms: int


def draw_levels(
    levels: Sequence[Level], logits: Sequence[Float[Tensor, "nodes vocab"]]
) -> list[DrawnLevel | None]:
    """Draw the children of every level in tensor programs; `None` where the builder must draw them itself.

    It must if its trees do not have a fixed width per level, if the draft law is greedy, or if
    draws cannot be peeked. It also must if a law is not finite or has fewer tokens than are drawn.
    The children are the same, as functions of the draws, up to rounding.

    Args:
        levels: The levels.
        logits: Logits at their frontiers.
    """
    drawn_levels: list[DrawnLevel | None] = [None] * len(levels)
    groups: dict[Hashable, list[int]] = {}
    for place, level in enumerate(levels):
        if (key := _key(level)) is not None:
            groups.setdefault((key, logits[place].shape[1]), []).append(place)
    for places in groups.values():
        drawn = _drawn([levels[place] for place in places], [logits[place] for place in places])
        for place, drawn_level in zip(places, drawn, strict=True):
            drawn_levels[place] = drawn_level
    return drawn_levels


def _key(level: Level) -> Hashable | None:
    """Return the key of the batch in which a level is drawn, or `None` if its builder must draw it."""
    builder, rules = level.builder, level.rules
    if (
        not isinstance(builder, LevelTree)
        or not builder.has_rows
        or rules.temperature == 0
        or not can_peek(level.draws)
        or not builder.served(level.tree, level.frontier, level.plan)
    ):
        return None
    width = builder.level_widths[level.tree.depths[level.frontier[0]]]
    return builder, width, rules.kind


def _drawn(levels: Sequence[Level], logits: Sequence[Tensor]) -> Iterator[DrawnLevel | None]:
    builder = levels[0].builder
    assert isinstance(builder, LevelTree), "`_key` asks first"
    draw = builder.kind.draw_rows
    assert draw is not None, "`_key` asks first"
    width = builder.level_widths[levels[0].tree.depths[levels[0].frontier[0]]]
    counts = [builder.served(level.tree, level.frontier, level.plan) for level in levels]
    served = torch.cat([rows[:num] for rows, num in zip(logits, counts, strict=True)])
    rules = [level.rules for level, num in zip(levels, counts, strict=True) for _ in range(num)]
    probs = probs_from_logits(served[:, None], rule_rows(rules, served)).squeeze(1)
    uniforms = [
        number
        for level, num in zip(levels, counts, strict=True)
        if can_peek(level.draws)
        for number in level.draws.peek(num * width)
    ]
    positions = torch.tensor(uniforms, dtype=torch.float64).reshape(-1, width)
    positions = positions.to(probs.device, non_blocking=True)
    # The only number of the level that the host waits for.
    tokens: list[list[int]] = draw(probs, positions).tolist()
    laws, start = list(map(trusted_law, probs)), 0
    for level, num in zip(levels, counts, strict=True):
        children = tokens[start : start + num]
        yield (
            None
            if min(map(min, children)) < 0
            else DrawnLevel(
                laws=laws[start : start + num],
                tokens=dict(zip(level.frontier, map(tuple, children), strict=False)),
                num_uniforms=num * width,
            )
        )
        start += num
