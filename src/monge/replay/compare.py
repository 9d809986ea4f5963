"""Replay configurations on one log."""

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from statistics import fmean
from typing import Any, Final

from monge.control.fixed import Fixed
from monge.core.errors import MongeError
from monge.core.model import SequenceModel
from monge.engine.components import Components
from monge.replay.configuration import Configuration
from monge.replay.costs import costs_for, untimed
from monge.replay.log import LawLog
from monge.replay.rules import stands_in
from monge.replay.simulate import PLAIN, simulate
from monge.replay.summary import summary
from monge.replay.text import ReplayTarget

REPEATS: Final = 4


def replay(
    configuration: Configuration,
    log: LawLog,
    draft: SequenceModel | None,
    *,
    repeats: int = REPEATS,
    seed: int = 0,
    target: SequenceModel | None = None,
    on_text: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Return the figures of one configuration, see `monge.replay.summary.summary`.

    A drafter of which the log has no times is replayed as on a log without any: rounds are counted,
    speeds are not predicted.

    Args:
        configuration: Drafter, tree, verifier, controller.
        log: The log.
        draft: The draft model, for drafters that run one.
        repeats: Passes over the log, because drafts are random.
        seed: Of passes and bootstrap.
        target: The target, for drafters that read its hidden states, layers or rankings.
        on_text: Called after every text of every pass.

    Raises:
        MongeError: If the parts do not fit together, or the log cannot answer.
    """
    parts = configuration.components(
        ReplayTarget(log.model.vocab_size) if target is None else target, draft
    )
    names = configuration.drafter_names(draft)
    reason = untimed(log, names)
    costs = costs_for(log, names) if log.costs and reason is None else None
    passes = simulate(
        parts,
        log,
        costs or PLAIN,
        nodes=None if costs is None else _nodes_by_depth(parts, log, seed),
        repeats=repeats,
        seed=seed,
        on_text=on_text,
    )
    compact = stands_in(
        parts.rule, parts.drafter.capabilities.proposes, is_compact=log.top is not None
    )
    found = summary(configuration, log, passes, costs, seed=seed)
    return {**found, "stands_in": compact, "untimed": reason}


def compare(
    configurations: Sequence[Configuration],
    log: LawLog,
    draft: SequenceModel | None,
    **settings: Any,
) -> dict[str, Any]:
    """Replay configurations, and keep the reason for each one that cannot be replayed.

    Args:
        configurations: What is replayed.
        log: The log.
        draft: The draft model, for drafters that run one.
        **settings: For `replay`.

    Returns:
        `replayed` (summaries), `refused` (label and reason).
    """
    replayed: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for configuration in configurations:
        try:
            replayed.append(replay(configuration, log, draft, **settings))
        except MongeError as error:
            refused.append({"label": configuration.label, "reason": str(error)})
    return {"replayed": replayed, "refused": refused}


def _nodes_by_depth(components: Components, log: LawLog, seed: int) -> tuple[int, ...]:
    """Return the drafted nodes of plans of depth 0, 1, ..., by the mean of one pass of full plans."""
    passes = simulate(with_fields(components, controller=Fixed()), log, seed=seed)
    rounds = [record for one in passes for record in one.records if record.depth]
    if not rounds:
        return (0,)
    nodes_a_level = fmean(record.num_nodes / record.depth for record in rounds)
    deepest = max(record.depth for record in rounds)
    return tuple(round(nodes_a_level * depth) for depth in range(deepest + 1))
