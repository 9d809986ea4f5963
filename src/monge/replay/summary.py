"""Figures of a replayed configuration, with intervals from resampled texts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from monge.core.metrics import acceptance_by_depth, draft_utilisation
from monge.replay.configuration import Configuration
from monge.replay.log import LawLog
from monge.replay.play import OracleBounds, ReplayedText, seeded
from monge.replay.survey import Position, survival

RESAMPLES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio of sums over texts, and the middle 95% of its values on resampled texts (Efron 1979)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """Sums by text, over all passes."""

    tokens: Float64[np.ndarray, " texts"]
    rounds: Float64[np.ndarray, " texts"]
    seconds: Float64[np.ndarray, " texts"]

    @classmethod
    def of(cls, played: Sequence[ReplayedText], num_texts: int) -> "Totals":
        """Sums of replayed passes."""
        sums = np.zeros((3, num_texts))
        for one in played:
            tokens = sum(len(record.token_ids) for record in one.records)
            sums[:, one.text] += (
                tokens,
                len(one.records),
                sum(record.times.total_s for record in one.records),
            )
        return cls(tokens=sums[0], rounds=sums[1], seconds=sums[2])


def resampled(num_texts: int, seed: int = 0) -> Int64[np.ndarray, "resamples texts"]:
    """Texts drawn with replacement; the same for equal seeds, so that configurations are compared in pairs."""
    draws = seeded(seed, "bootstrap")
    drawn = [[int(draws.uniform() * num_texts) for _ in range(num_texts)] for _ in range(RESAMPLES)]
    return np.array(drawn, dtype=np.int64)


def ratio(
    top: np.ndarray, bottom: np.ndarray, choices: Int64[np.ndarray, "resamples texts"]
) -> Estimate:
    """Sum over sum, with its interval."""
    values = top[choices].sum(axis=1) / bottom[choices].sum(axis=1)
    low, high = np.percentile(values, [2.5, 97.5])
    return Estimate(mean=float(top.sum() / bottom.sum()), low=float(low), high=float(high))


def summary(
    configuration: Configuration,
    log: LawLog,
    played: Sequence[ReplayedText],
    seen: OracleBounds,
    *,
    is_timed: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Figures of one configuration, as plain values for JSON.

    Args:
        configuration: What was replayed.
        log: On which texts.
        played: The passes.
        seen: What could have been had.
        is_timed: Whether costs are known; without them speeds are `None`, and regret counts rounds
            instead of seconds.
        seed: Of the bootstrap.

    Returns:
        `block_efficiency`, `tokens_per_s`, `speedup` (each mean, low, high), `acceptance_by_depth`,
        `draft_utilisation`, `hindsight`, `controller_regret`, `survival`, and `tags`
        with the main figures of each.
    """
    choices, every = resampled(len(log.texts), seed), np.arange(len(log.texts))
    totals = Totals.of(played, len(log.texts))
    records = [record for one in played for record in one.records]
    figures = _figures(totals, seen, every, choices, is_timed=is_timed)
    tags = {}
    for tag in log.tags:
        chosen = np.array([number for number, text in enumerate(log.texts) if text.tag == tag])
        part = resampled(len(chosen), seed)
        tags[tag] = _figures(totals, seen, chosen, chosen[part], is_timed=is_timed)
    return {
        "label": configuration.label,
        "configuration": configuration.settings,
        **figures,
        "acceptance_by_depth": list(acceptance_by_depth(records)),
        "draft_utilisation": draft_utilisation(records),
        "mean_window": sum(record.depth for record in records) / len(records),
        "survival": list(survival_curve(seen.positions, len(seen.windows) - 1)),
        "windows": _trace(played),
        "lengths": [len(text.token_ids) for text in log.texts],
        "tags": tags,
    }


def survival_curve(positions: Sequence[Sequence[Position]], depth: int) -> tuple[float, ...]:
    """Mean over all positions of P(the first k draft tokens are accepted), k = 1, 2, ..."""
    curves = [(survival(text, depth), len(text)) for text in positions]
    total = sum(weight for _, weight in curves)
    return tuple(
        sum(curve[level] * weight for curve, weight in curves) / total for level in range(depth)
    )


def _figures(
    totals: Totals, seen: OracleBounds, texts: np.ndarray, choices: np.ndarray, *, is_timed: bool
) -> dict[str, Any]:
    tokens = totals.tokens
    lengths = np.array([len(text) for text in seen.positions], dtype=np.float64)
    passes = float(tokens.sum() / lengths.sum())
    windows = [_expected(row, lengths, texts) for row in seen.windows]
    best = max(windows, key=lambda window: window["tokens_per_s"])
    ideal = _expected(seen.oracle, lengths, texts)
    speed = float(tokens[texts].sum() / totals.seconds[texts].sum())
    plain = np.array([text.seconds for text in seen.windows[0]]) * passes
    return {
        "block_efficiency": asdict(_on(texts, tokens, totals.rounds, choices)),
        "tokens_per_s": asdict(_on(texts, tokens, totals.seconds, choices)) if is_timed else None,
        "speedup": asdict(_on(texts, plain, totals.seconds, choices)) if is_timed else None,
        "hindsight": {
            "best_window": windows.index(best),
            "windows": windows
            if is_timed
            else [{**window, "tokens_per_s": None} for window in windows],
            "oracle": ideal if is_timed else {**ideal, "tokens_per_s": None},
        },
        "controller_regret": {
            "best_fixed": 1.0 - speed / best["tokens_per_s"],
            "oracle": 1.0 - speed / ideal["tokens_per_s"],
        },
    }


def _on(texts: np.ndarray, top: np.ndarray, bottom: np.ndarray, choices: np.ndarray) -> Estimate:
    mean = float(top[texts].sum() / bottom[texts].sum())
    found = ratio(top, bottom, choices)
    return Estimate(mean=mean, low=found.low, high=found.high)


def _expected(row: Sequence[Any], lengths: np.ndarray, texts: np.ndarray) -> dict[str, float]:
    total = float(lengths[texts].sum())
    seconds = sum(row[int(text)].seconds for text in texts)
    return {
        "block_efficiency": total / sum(row[int(text)].rounds for text in texts),
        "tokens_per_s": total / seconds,
    }


def _trace(played: Sequence[ReplayedText]) -> list[list[list[int]]]:
    """Of the first pass, by text: (tokens written before the round, its window, accepted tokens)."""
    traces: list[list[list[int]]] = []
    for one in (each for each in played if each.repeat == 0):
        written, trace = 0, list[list[int]]()
        for record in one.records:
            trace.append([written, record.depth, record.num_accepted])
            written += len(record.token_ids)
        traces.append(trace)
    return traces
