"""Block efficiency of trees and verifiers.

Rounds of the real networks from the same prefixes for all.

Every shape draws one tree at every root, the target reads it, and then all rules that are exact for
it are asked what they expect of this tree. Networks run once a tree, whatever the number of rules,
and rules are compared on equal trees.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from jaxtyping import Int64

from lab.acceptance.expected_tokens import expected_tokens
from lab.acceptance.log import LawLog, LogSettings, Root, draft_rules_of, seeded
from lab.acceptance.shapes import Shape
from monge.bench.pair import Pair
from monge.bench.resamples import Resamples
from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.draft.model import Model
from monge.laws.tree import TokenTree
from monge.networks.base import NodeBlock
from monge.requests.sampling import NodeLaws
from monge.verify.base import why_no_exactness
from monge.verify.registry import VERIFIERS

BATCH: Final = 8
SINGLE: Final = "speculative_sampling"
REJECTIONS: Final = ("recursive_rejection", "recursive_rejection_without_replacement")
"""Recursive rejection: the rule that engines use, with and without replacement."""


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Rounds of one shape."""

    texts: list[int] = field(default_factory=list)
    num_nodes: list[float] = field(default_factory=list)
    accepted: dict[str, list[float]] = field(default_factory=dict)


def round_records(
    pair: Pair,
    log: LawLog,
    shapes: Sequence[Shape],
    settings: LogSettings,
    *,
    verifications: int,
    resamples: Resamples,
    on_shape: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Mean tokens a round, by shape and rule.

    Args:
        pair: The networks.
        log: Its roots are where the rounds start.
        shapes: Trees.
        settings: Those of the log: the draft law is truncated in the same way.
        verifications: Decisions on every tree of a rule that has no flows.
        resamples: For the intervals.
        on_shape: Told the shape before every batch.

    Returns:
        Records with `temperature`, the shape's `family`, `children`, `budget` and `tree`,
        `num_nodes` (mean), `depth`, `rule`, `num_rounds`, and with mean, low and high:
        `block_efficiency` (accepted tokens + 1), `over_rejection` (that over the one of recursive
        rejection on the same trees), `over_one_draft` (over single-draft verification of one chain
        of the same depth from the same prefixes); `None` where there is no such rule or chain.
    """
    tallies = [_Tally() for _ in shapes]
    for start in range(0, len(log.roots), BATCH):
        roots = log.roots[start : start + BATCH]
        contexts = [
            Context(
                request_id=row,
                token_ids=root.token_ids,
                num_prompt_tokens=len(root.token_ids),
                rules=SamplingRules(temperature=log.temperature),
            )
            for row, root in enumerate(roots)
        ]
        pair.target_model.open({context.request_id: context.token_ids[:-1] for context in contexts})
        for shape, tally in zip(shapes, tallies, strict=True):
            on_shape(shape.name)
            trees = _draw(pair, shape, contexts, settings, number=start)
            _decide(
                pair,
                shape,
                contexts,
                trees,
                roots=roots,
                tally=tally,
                verifications=verifications,
                seed=settings.seed,
            )
        for context in contexts:
            pair.target_model.close(context.request_id)
    records = [
        record
        for shape, tally in zip(shapes, tallies, strict=True)
        for record in _records(log, shape, tally, resamples)
    ]
    _compare_with_one_draft(records, shapes, tallies, resamples)
    return records


def _compare_with_one_draft(
    records: Sequence[dict[str, Any]],
    shapes: Sequence[Shape],
    tallies: Sequence[_Tally],
    resamples: Resamples,
) -> None:
    """Add `over_one_draft`, the comparison of SpecTr, where a single path of the same depth was drafted too."""
    by_name = {shape.name: tally for shape, tally in zip(shapes, tallies, strict=True)}
    single = {
        shape.builder.limits.max_depth: tally.accepted[SINGLE]
        for shape, tally in zip(shapes, tallies, strict=True)
        if shape.builder.limits.max_width == 1 and SINGLE in tally.accepted
    }
    for record in records:
        tally = by_name[record["tree"]]
        texts = np.array(tally.texts, dtype=np.int64)
        record["over_one_draft"] = _over(
            tally.accepted[record["rule"]], single.get(record["depth"]), texts, resamples
        )


def num_batches(log_roots: int) -> int:
    """Batches of roots."""
    return -(-log_roots // BATCH)


def _draw(
    pair: Pair, shape: Shape, contexts: Sequence[Context], settings: LogSettings, *, number: int
) -> list[TokenTree]:
    assert pair.draft_model is not None, "laws were logged, so there is a draft model"
    rules = draft_rules_of(contexts[0].rules.temperature, settings)
    drafter = Model(model=pair.draft_model, tree=shape.builder, rules=rules)
    states = drafter.open(contexts)
    draws = [
        seeded(settings.seed, "draft", shape.name, rules.temperature, number, row)
        for row in range(len(contexts))
    ]
    drafts = drafter.draft(contexts, states, [DraftPlan()] * len(contexts), draws)
    for context in contexts:
        drafter.close(context)
    return [draft.result().tree for draft in drafts]


def _decide(
    pair: Pair,
    shape: Shape,
    contexts: Sequence[Context],
    trees: Sequence[TokenTree],
    *,
    roots: Sequence[Root],
    tally: _Tally,
    verifications: int,
    seed: int,
) -> None:
    blocks = {
        c.request_id: NodeBlock(tree.token_ids, tree.parents)
        for c, tree in zip(contexts, trees, strict=True)
    }
    logits = pair.target_model.extend(blocks)
    for context, tree, root in zip(contexts, trees, roots, strict=True):
        laws = NodeLaws(logits[context.request_id], tree, context, ())
        tally.texts.append(root.text)
        tally.num_nodes.append(tree.num_nodes - 1)
        for name in legal_rules(shape):
            draws_name = (
                seed,
                "verify",
                name,
                shape.name,
                context.rules.temperature,
                root.token_ids,
            )
            accepted = expected_tokens(
                VERIFIERS.make(name), tree, laws, seeded(*draws_name), decisions=verifications
            )
            tally.accepted.setdefault(name, []).append(accepted)
    pair.target_model.commit({context.request_id: () for context in contexts})


def legal_rules(shape: Shape) -> list[str]:
    """Verifiers that are exact for what a shape draws."""
    limits = shape.builder.limits
    return [
        name
        for name in VERIFIERS
        if why_no_exactness(VERIFIERS.make(name), limits.proposes, limits.max_width) is None
    ]


def _records(
    log: LawLog, shape: Shape, tally: _Tally, resamples: Resamples
) -> list[dict[str, Any]]:
    texts = np.array(tally.texts, dtype=np.int64)
    rejection = next((name for name in REJECTIONS if name in tally.accepted), None)
    return [
        {
            "temperature": log.temperature,
            "family": shape.family,
            "children": shape.children,
            "budget": shape.budget,
            "tree": shape.name,
            "depth": shape.builder.limits.max_depth,
            "width": shape.builder.limits.max_width,
            "num_nodes": float(np.mean(tally.num_nodes)),
            "rule": name,
            "num_rounds": len(accepted),
            "block_efficiency": asdict(resamples.estimate(1.0 + np.array(accepted), texts)),
            "over_rejection": _over(
                accepted, tally.accepted.get(rejection or ""), texts, resamples
            ),
        }
        for name, accepted in tally.accepted.items()
    ]


def _over(
    accepted: list[float],
    others: list[float] | None,
    texts: Int64[np.ndarray, " rounds"],
    resamples: Resamples,
) -> dict[str, float] | None:
    """Tokens a round over those of another rule or shape, at the same roots."""
    if others is None:
        return None
    return asdict(resamples.ratio(1.0 + np.array(accepted), 1.0 + np.array(others), texts))
