"""AdaHedge: regret stays below the published bound, and forgetting follows a change."""

import math

import pytest

from monge.control.ada_hedge import AdaHedge


@pytest.mark.parametrize("pattern", ["one is best", "alternating", "the best changes"])
def test_regret_stays_below_the_bound(pattern: str) -> None:
    """Synthetic drafters with losses in [0, 1]: de Rooij et al., Theorem 8, with V <= T / 4."""
    rounds, weights, spent = 400, AdaHedge((0.0, 0.0, 0.0)), 0.0
    sums = [0.0, 0.0, 0.0]
    for number in range(rounds):
        losses = {
            "one is best": (0.5, 0.4 + 0.2 * (number % 2), 0.9),
            "alternating": (float(number % 2), float((number + 1) % 2), 0.5),
            "the best changes": (float(number >= 200), float(number < 200), 0.6),
        }[pattern]
        spent += math.fsum(
            weight * loss for weight, loss in zip(weights.weights, losses, strict=True)
        )
        sums = [total + loss for total, loss in zip(sums, losses, strict=True)]
        weights = weights.update(losses)
        assert math.isclose(sum(weights.weights), 1.0)
    bound = math.sqrt(rounds * math.log(3)) + 4 / 3 * math.log(3) + 2
    assert spent - min(sums) <= bound
    assert bound < 0.1 * rounds + 5  # the bound says something


def test_forgetting_follows_a_change() -> None:
    weights = AdaHedge((0.0, 0.0))
    for number in range(300):
        weights = weights.update((1.0, 0.0) if number < 200 else (0.0, 1.0), 0.95)
    assert weights.weights[0] > 0.9
