"""Draws the figures of the page of verifiers.

`python docs/figures.py [RULE ...]`, into `docs/figures/acceptance`.

Every point is one pair of laws of a fixed bank and one way of drafting two candidates: across, the
optimum for this way; up, the acceptance of the rule. Both are exact: closed forms, or enumeration
where there is none. The diagonal is optimal.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from lab.acceptance.plots import rule_figure
from monge.laws.law import DenseLaw
from monge.oracle.acceptance import acceptance, legal_schemes
from monge.oracle.schemes import closed_form, optimum, sampling_schemes
from monge.oracle.tabular import RandomTable
from monge.verify.registry import VERIFIERS

FOLDER = Path(__file__).parent / "figures" / "acceptance"
NUM_TOKENS, NUM_PAIRS, WIDTH = 4, 40, 2


def bank() -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of laws, unrelated at first, closer and closer to each other towards the end."""
    pairs = []
    for number in range(NUM_PAIRS):
        p, other = (
            np.array(RandomTable(NUM_TOKENS, 2 * number + side, "sparse")(())) ** 2
            for side in (0, 1)
        )
        share = number / NUM_PAIRS
        mixed = share * p / p.sum() + (1.0 - share) * other / other.sum()
        pairs.append((p / p.sum(), mixed / mixed.sum()))
    return pairs


def points(name: str) -> list[tuple[str, float, float]]:
    """Drafting, optimum and acceptance of a rule over the bank."""
    rule = VERIFIERS.make(name)
    found = []
    for p, q in bank():
        target = DenseLaw(torch.from_numpy(p.copy()))
        for way, proposal in legal_schemes(rule, sampling_schemes(q, WIDTH)).items():
            best, value = optimum(p, proposal), closed_form(name, p, proposal)
            if value is None:
                value = acceptance(name, target, proposal)[0]
            if best is not None and value is not None:
                found.append((way, best, value))
    return found


def main(names: list[str]) -> None:
    """Draw the figures of some rules, or of all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or list(VERIFIERS):
        found = points(name)
        if found:
            print(rule_figure(name, found, FOLDER / f"{name}.png"), f"{len(found)} points")


if __name__ == "__main__":
    main(sys.argv[1:])
