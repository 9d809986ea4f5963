"""How often some candidate can be accepted, by the way the candidates are drawn.

Mean optimum on synthetic laws.

    python examples/compare_draft_laws.py [rows]

A row is a target law with logits -1.3 log(rank) + 0.5 N(0, 1) over 64 tokens, and a draft law with
logits N(0, sigma^2) beside them, both at temperature T. Every column is the optimum for its way of
drawing; a rule that attains it is shipped for all but the last one.
"""

import sys

import numpy as np
import torch

from monge.transport.bounds import greedy_optimum, iid_optimum, without_replacement_optimum

SETTINGS = ((1.0, 0.8), (1.0, 1.5), (0.6, 0.8), (0.3, 0.8))


def pair(
    generator: torch.Generator, temperature: float, sigma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A target law and a draft law."""
    noise = torch.randn(2, 64, generator=generator, dtype=torch.float64)
    target = -1.3 * torch.arange(1, 65, dtype=torch.float64).log() + 0.5 * noise[0]
    return torch.softmax(target / temperature, 0), torch.softmax(
        (target + sigma * noise[1]) / temperature, 0
    )


def optima(p: torch.Tensor, q: torch.Tensor, width: int) -> dict[str, float]:
    """The largest acceptance for each way of drawing `width` candidates."""
    dense = p.numpy(), q.numpy()
    return {
        "greedy": greedy_optimum(*dense, width).acceptance,
        "i.i.d.": iid_optimum(*dense, width).acceptance,
        "without replacement": without_replacement_optimum(*dense, width).acceptance,
    }


def main() -> None:
    """Print one line per number of candidates and setting."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    for width in (2, 4):
        for index, (temperature, sigma) in enumerate(SETTINGS):
            generator = torch.Generator().manual_seed(index)
            found = [optima(*pair(generator, temperature, sigma), width) for _ in range(rows)]
            if width == 2 and index == 0:
                print(f"| K | T, sigma | {' | '.join(found[0])} |\n|{'---|' * (2 + len(found[0]))}")
            means = (float(np.mean([values[name] for values in found])) for name in found[0])
            print(
                f"| {width} | {temperature}, {sigma} | "
                f"{' | '.join(f'{mean:.3f}' for mean in means)} |"
            )


if __name__ == "__main__":
    main()
