"""Replay configurations on one log, and sum up, with intervals from resampled texts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from dataclasses import replace as with_fields
from statistics import fmean
from typing import Any, Final

import numpy as np

from monge.control.fixed import Fixed
from monge.core.errors import MongeError
from monge.core.metrics import acceptance_by_depth, draft_utilisation
from monge.core.model import SequenceModel
from monge.core.resamples import Resamples
from monge.engine.components import Components
from monge.replay.configuration import Configuration
from monge.replay.costs import RoundCosts, costs_for, untimed
from monge.replay.log import LawLog
from monge.replay.rules import stands_in
from monge.replay.simulate import PLAIN, SimulatedText, plain_seconds, seeded, simulate
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
    on_text: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the figures of one configuration, as plain values for JSON.

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

    Returns:
        `block_efficiency`, `tokens_per_s`, `speedup` (each mean, low, high; speeds are `None` without
        costs, and `untimed` has the reason), `acceptance_by_depth`, `draft_utilisation`, `mean_depth`,
        `tags` with the main figures of each, and `stands_in`, see there.

    Raises:
        MongeError: If the parts do not fit together, or the log cannot answer.
    """
    parts = configuration.components(
        ReplayTarget(log.model.vocab_size) if target is None else target, draft
    )
    names, can = configuration.drafter_names(draft), parts.drafter.capabilities
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
    records = [record for simulated in passes for record in simulated.records]
    sums = _sums(passes, log, costs)
    tags = np.array([text.tag for text in log.texts])
    return {
        "label": configuration.label,
        "configuration": configuration.settings,
        **_figures(sums, seed, is_timed=costs is not None),
        "acceptance_by_depth": list(acceptance_by_depth(records)),
        "draft_utilisation": draft_utilisation(records),
        "mean_depth": sum(record.depth for record in records) / len(records),
        "tags": {
            tag: _figures(sums[:, tags == tag], seed, is_timed=costs is not None)
            for tag in log.tags
        },
        "stands_in": stands_in(parts.rule, can.proposes, is_compact=log.top is not None),
        "untimed": reason,
    }


def compare(
    configurations: Sequence[Configuration],
    log: LawLog,
    draft: SequenceModel | None,
    **settings: Any,
) -> dict[str, Any]:
    """Replay configurations, and keep the reason for each one that cannot be replayed.

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
    rounds = [record for simulated in passes for record in simulated.records if record.depth]
    if not rounds:
        return (0,)
    nodes_a_level = fmean(record.num_nodes / record.depth for record in rounds)
    deepest = max(record.depth for record in rounds)
    return tuple(round(nodes_a_level * depth) for depth in range(deepest + 1))


def _sums(passes: Sequence[SimulatedText], log: LawLog, costs: RoundCosts | None) -> np.ndarray:
    """Return tokens, rounds, seconds and seconds of plain decoding, summed by text over all passes."""
    sums = np.zeros((4, len(log.texts)))
    plain = [0.0 if costs is None else plain_seconds(text, costs) for text in log.texts]
    for simulated in passes:
        sums[:, simulated.text] += (
            sum(len(record.token_ids) for record in simulated.records),
            len(simulated.records),
            sum(record.times.total_s for record in simulated.records),
            plain[simulated.text],
        )
    return sums


def _figures(sums: np.ndarray, seed: int, *, is_timed: bool) -> dict[str, Any]:
    """Return ratios of sums over texts; equal seeds compare configurations in pairs."""
    tokens, rounds, seconds, plain = sums
    texts = np.arange(tokens.size)
    resamples = Resamples.draw(tokens.size, seeded(seed, "bootstrap"))
    figures = {"block_efficiency": (tokens, rounds)}
    speeds = {"tokens_per_s": (tokens, seconds), "speedup": (plain, seconds)}
    if is_timed:
        figures |= speeds
    ratios = {name: asdict(resamples.ratio(*figure, texts)) for name, figure in figures.items()}
    return dict.fromkeys(speeds) | ratios
