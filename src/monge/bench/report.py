"""From measurements to numbers: a record for each arm, and the ratios that matter."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from monge.bench.arms import DEFAULT, NONE, PLAIN, HostArm, MongeArm
from monge.bench.runner import Measurement
from monge.bench.statistics import (
    RepeatSummary,
    geometric_mean,
    is_degenerate,
    paired_ratios,
    ratio_of_sums,
)
from monge.control.base import Reads
from monge.core.metrics import (
    acceptance_by_depth,
    block_efficiency,
    draft_utilisation,
    engine_efficiency,
)
from monge.core.verdict import StepRecord

STAGES = ("draft_s", "score_s", "verify_s", "commit_s", "other_s")


def find(
    measurements: Sequence[Measurement], name: str, temperature: float, batch_size: int
) -> Measurement | None:
    """Return the measurement of an arm, or `None` where it failed or was not measured."""
    place = {"temperature": temperature, "batch_size": batch_size}
    for measurement in measurements:
        if measurement.arm.name == name and measurement.place == place:
            return measurement if measurement.failure is None else None
    return None


def best_assisted(
    measurements: Sequence[Measurement], temperature: float, batch_size: int
) -> Measurement | None:
    """Return the assisted arm of transformers with the largest median."""
    names = [
        measurement.arm.name for measurement in measurements if measurement.arm.family == "assisted"
    ]
    arms = [find(measurements, name, temperature, batch_size) for name in dict.fromkeys(names)]
    measured = [arm for arm in arms if arm is not None]
    return max(measured, key=lambda arm: RepeatSummary.of(arm.tokens_per_s).median, default=None)


def speedup(ours: Measurement | None, theirs: Measurement | None) -> RepeatSummary | None:
    """Return paired ratios of tokens per second, repeat by repeat; `None` where a side has no numbers."""
    if ours is None or theirs is None:
        return None
    return RepeatSummary.of(paired_ratios(ours.tokens_per_s, theirs.tokens_per_s))


def arm_record(measurement: Measurement, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return everything about an arm at a temperature and batch size, as plain values.

    A failed arm has no numbers.
    """
    arm, where = measurement.arm, measurement.place
    record: dict[str, Any] = {
        "arm": arm.name,
        "family": arm.family,
        "settings": _settings(measurement),
        **where,
        "failure": measurement.failure,
    }
    if measurement.failure is not None:
        return record
    plain, none = (find(measurements, name, **where) for name in (PLAIN, NONE))
    ratio, over_none = speedup(measurement, plain), speedup(measurement, none)
    seconds, of_all = measurement.seconds_of_repeats, None
    if none is not None and len(seconds) > 1:
        of_all = ratio_of_sums(none.seconds_of_repeats, seconds, range(len(seconds)))
    looping = [is_degenerate(completion) for completion in measurement.completions]
    record |= {
        "num_tokens": sum(measurement.num_tokens),
        "seconds": seconds,
        "tokens_per_s": asdict(RepeatSummary.of(measurement.tokens_per_s)),
        "ratio_to_plain": ratio and asdict(ratio),
        "ratio_to_none": over_none and asdict(over_none),
        "ratio_to_none_of_all": of_all and asdict(of_all),
        "degenerate_share": sum(looping) / len(looping),
        "same_as_plain_share": _same_share(measurement, plain),
    }
    return record | (rates(measurement.records) if measurement.records else {})


def rates(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the rates of `core/metrics.py`, and seconds per round by stage (a round shared by a batch counts once)."""
    num_rounds = sum(1 / record.batch_size for record in records)
    stages = {
        stage: sum(getattr(record.times, stage) / record.batch_size for record in records)
        / num_rounds
        for stage in (*STAGES[:-1], "total_s", "forward_s")
    }
    stages["other_s"] = stages["total_s"] - sum(stages[stage] for stage in STAGES[:-1])
    return {
        "block_efficiency": block_efficiency(records),
        "engine_efficiency": engine_efficiency(records),
        "draft_utilisation": draft_utilisation(records),
        "acceptance_by_depth": list(acceptance_by_depth(records)),
        "num_rounds": round(num_rounds),
        "seconds_per_round": stages,
    }


def summary(measurements: Sequence[Measurement], *, batch_size: int) -> dict[str, Any]:
    """Return the headline: default settings against plain and the best assisted arm, greedy, sampled and pooled.

    Pooled speed-ups are geometric means over the temperatures; pooled efficiencies pool the rounds
    of all of them.
    """
    parts: dict[str, dict[str, Any]] = {}
    pooled: list[StepRecord] = []
    for temperature in dict.fromkeys(part.place["temperature"] for part in measurements):
        ours = find(measurements, DEFAULT, temperature, batch_size)
        assisted = best_assisted(measurements, temperature, batch_size)
        over_plain = speedup(ours, find(measurements, PLAIN, temperature, batch_size))
        over_assisted = speedup(ours, assisted)
        parts["greedy" if temperature == 0 else "sampled"] = {
            "temperature": temperature,
            "speedup_over_plain": over_plain and over_plain.median,
            "speedup_over_assisted": over_assisted and over_assisted.median,
            "best_assisted": assisted and assisted.arm.name,
            **({} if ours is None else _efficiencies(ours.records)),
        }
        pooled += [] if ours is None else ours.records
    return {
        "speedup_over_plain": _mean_of(parts, "speedup_over_plain"),
        "speedup_over_assisted": _mean_of(parts, "speedup_over_assisted"),
        **_efficiencies(pooled),
        "batch_size": batch_size,
        **parts,
    }


def _efficiencies(records: Sequence[StepRecord]) -> dict[str, float | None]:
    return {
        "engine_efficiency": engine_efficiency(records) if records else None,
        "block_efficiency": block_efficiency(records) if records else None,
    }


def slowest_adaptive(measurements: Sequence[Measurement]) -> dict[str, Any] | None:
    """Return where a controller that reads latency does worst against plain decoding.

    Plain decoding is the better of transformers' and of this library's without speculation, each a
    median of paired ratios.
    """
    ratios_of_arms: list[dict[str, Any]] = []
    for measurement in measurements:
        where = measurement.place
        reads = measurement.arm.reads if isinstance(measurement.arm, MongeArm) else ()
        if measurement.failure is not None or Reads.LATENCY not in reads:
            continue
        ratios = [speedup(measurement, find(measurements, name, **where)) for name in (PLAIN, NONE)]
        if medians := [ratio.median for ratio in ratios if ratio is not None]:
            ratios_of_arms.append(
                {"arm": measurement.arm.name, **where, "ratio_to_faster_plain": min(medians)}
            )
    return min(ratios_of_arms, key=lambda entry: entry["ratio_to_faster_plain"], default=None)


def write_rounds(measurements: Sequence[Measurement], path: Path) -> Path:
    """Write the raw round records as JSON lines. Every rate is computed from them."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for measurement in measurements:
            where = {"arm": measurement.arm.name, **measurement.place}
            for record in measurement.records:
                file.write(json.dumps(where | asdict(record)) + "\n")
    return path


def _settings(measurement: Measurement) -> dict[str, Any]:
    arm = measurement.arm
    settings = dict(arm.settings)
    if isinstance(arm, HostArm) and arm.assistant is not None:
        settings["assistant"] = dict(arm.assistant.get(measurement.work.temperature, {}))
    return settings


def _same_share(measurement: Measurement, plain: Measurement | None) -> float | None:
    """Return the share of greedy completions that equal those of plain decoding.

    Sampled completions differ by chance.
    """
    if plain is None or measurement.work.temperature > 0:
        return None
    pairs = list(zip(measurement.completions, plain.completions, strict=True))
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def _mean_of(parts: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    values = [part[name] for part in parts.values()]
    return None if not values or None in values else geometric_mean(values)
