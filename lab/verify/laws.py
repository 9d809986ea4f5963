"""`python -m lab.verify --laws`: what the law of one row of logits costs under sampling rules.

The yardsticks are the law at temperature 1, and the time in which the row is read once, for its largest
number. All rules take turns, so that what slows the machine for a while
slows all of them. Logits are synthetic: peaked as those of a network, nearly flat, and equal, which is the
worst case of a rule that selects tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, Final

import torch

from monge.bench.provenance import provenance
from monge.bench.statistics import RepeatSummary, paired_ratios
from monge.cli.bench_decode import mode
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits

VOCAB_SIZES: Final = (49152, 151936, 262144)
LAWS: Final = 5
"""Laws of one measurement."""
TRUNCATIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.05},
)
RULES: Final = tuple(product((1.0, 0.7), TRUNCATIONS))
"""The first is the yardstick."""
PEAKED: Final = "peaked"
KINDS: Final = {PEAKED: 3.0, "nearly flat": 0.1, "equal": 0.0}
"""Standard deviation of logits."""
_PEAKS: Final = 50


def measure_laws(vocab_sizes: Sequence[int], repeats: int, device: torch.device) -> dict[str, Any]:
    """Time the law of a row under all rules, for every vocabulary and kind of logits.

    Raises:
        OptionError: If a number is not positive.
    """
    if min(*vocab_sizes, repeats) < 1:
        raise OptionError(f"verify: numbers must be positive; got {[*vocab_sizes, repeats]}")
    records: list[dict[str, Any]] = []
    all_rules = [SamplingRules(temperature=heat, **truncation) for heat, truncation in RULES]
    for vocab, kind in product(vocab_sizes, KINDS):
        row = _logits(vocab, kind).to(device)
        # The first turn is a warm-up.
        turns = [
            [read_s(row), *(_law_s(row, rules) for rules in all_rules)] for _ in range(repeats + 1)
        ][1:]
        read, *seconds = zip(*turns, strict=True)
        records += [
            {
                "vocab": vocab,
                "logits": kind,
                "rules": mode(*RULES[place]),
                "support": law_from_logits(row, rules).sparse().probs.numel(),
                "law_s": asdict(RepeatSummary.of(seconds[place])),
                "reads": asdict(RepeatSummary.of(paired_ratios(seconds[place], read))),
                "ratio": asdict(RepeatSummary.of(paired_ratios(seconds[place], seconds[0]))),
            }
            for place, rules in enumerate(all_rules)
        ]
    return {"provenance": provenance(device), "cells": records}


def _logits(vocab: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    row = torch.empty(vocab).normal_(0.0, 1.0, generator=generator) * KINDS[kind]
    if kind == PEAKED:
        row[:_PEAKS] += torch.empty(len(row[:_PEAKS])).uniform_(0.0, 12.0, generator=generator)
    return row


def read_s(row: torch.Tensor) -> float:
    """Return the seconds in which a row is read once, for its largest number."""
    start = time.perf_counter()
    largest = [row.amax() for _ in range(LAWS)]
    largest[-1].item()
    return (time.perf_counter() - start) / LAWS


def _law_s(row: torch.Tensor, rules: SamplingRules) -> float:
    start = time.perf_counter()
    laws = [law_from_logits(row, rules) for _ in range(LAWS)]
    laws[-1].prob(0)  # waits for devices that work on their own
    return (time.perf_counter() - start) / LAWS
