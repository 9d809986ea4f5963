"""Figures of a replayed configuration, with intervals from resampled texts."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from monge.core.metrics import acceptance_by_depth, draft_utilisation
from monge.core.resamples import Resamples
from monge.replay.configuration import Configuration
from monge.replay.costs import RoundCosts
from monge.replay.log import LawLog
from monge.replay.simulate import SimulatedText, plain_seconds, seeded


def summary(
    configuration: Configuration,
    log: LawLog,
    passes: Sequence[SimulatedText],
    costs: RoundCosts | None,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the figures of one configuration, as plain values for JSON.

    Args:
        configuration: What was replayed.
        log: The texts.
        passes: The simulated passes.
        costs: The predicted times; without them speeds are `None`.
        seed: Of the bootstrap.

    Returns:
        `block_efficiency`, `tokens_per_s`, `speedup` (each mean, low, high), `acceptance_by_depth`,
        `draft_utilisation`, `mean_depth`, `rounds` and `lengths` of the texts for plots, and `tags`
        with the main figures of each.
    """
    records = [record for one in passes for record in one.records]
    sums = _sums(passes, log, costs)
    tags = np.array([text.tag for text in log.texts])
    return {
        "label": configuration.label,
        "configuration": configuration.settings,
        **_figures(sums, seed, is_timed=costs is not None),
        "acceptance_by_depth": list(acceptance_by_depth(records)),
        "draft_utilisation": draft_utilisation(records),
        "mean_depth": sum(record.depth for record in records) / len(records),
        "rounds": _rounds_of_first_pass(passes),
        "lengths": [len(text.token_ids) for text in log.texts],
        "tags": {
            tag: _figures(sums[:, tags == tag], seed, is_timed=costs is not None)
            for tag in log.tags
        },
    }


def _sums(passes: Sequence[SimulatedText], log: LawLog, costs: RoundCosts | None) -> np.ndarray:
    """Return tokens, rounds, seconds and seconds of plain decoding, summed by text over all passes."""
    sums = np.zeros((4, len(log.texts)))
    plain = [0.0 if costs is None else plain_seconds(text, costs) for text in log.texts]
    for one in passes:
        sums[:, one.text] += (
            sum(len(record.token_ids) for record in one.records),
            len(one.records),
            sum(record.times.total_s for record in one.records),
            plain[one.text],
        )
    return sums


def _figures(sums: np.ndarray, seed: int, *, is_timed: bool) -> dict[str, Any]:
    """Return ratios of sums over texts; equal seeds compare configurations in pairs."""
    tokens, rounds, seconds, plain = sums
    texts = np.arange(tokens.size)
    resamples = Resamples.draw(tokens.size, seeded(seed, "bootstrap"))
    timed = {"tokens_per_s": tokens, "speedup": plain}
    return {
        "block_efficiency": asdict(resamples.ratio(tokens, rounds, texts)),
        **{
            name: asdict(resamples.ratio(top, seconds, texts)) if is_timed else None
            for name, top in timed.items()
        },
    }


def _rounds_of_first_pass(passes: Sequence[SimulatedText]) -> list[list[list[int]]]:
    """Return `[tokens written before the round, its depth, accepted tokens]` of every round, by text."""
    texts: list[list[list[int]]] = []
    for one in (each for each in passes if each.repeat == 0):
        written, rounds = 0, list[list[int]]()
        for record in one.records:
            rounds.append([written, record.depth, record.num_accepted])
            written += len(record.token_ids)
        texts.append(rounds)
    return texts
