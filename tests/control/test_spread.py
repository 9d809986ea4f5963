"""How far requests differ, told from groups of rounds."""

from dataclasses import replace

import pytest
import torch

from monge.control.price import Price
from monge.control.price_memory import pooled_of
from monge.control.spread import Spread
from monge.control.survival import DepthCounts
from tests.control.scripts import memory_of


def after(groups: int, size: int, spread: float, share: float = 0.7, seed: int = 0) -> list[float]:
    """Weights after each of so many groups, whose shares have this standard deviation, half above and half below."""
    generator, known, weights = torch.Generator().manual_seed(seed), Spread(), list[float]()
    for group in range(groups):
        own = share + (spread if group % 2 else -spread)
        drafts = [(1, int(coin < own)) for coin in torch.rand(size, generator=generator).tolist()]
        known = known.seen(drafts, share)
        weights.append(known.weight)
    return weights[groups // 2 :]


@pytest.mark.parametrize(("spread", "low", "high"), [(0.0, 30.0, 48.0), (0.1, 14.0, 30.0), (0.2, 4.0, 7.0), (0.3, 4.0, 4.0)])
@pytest.mark.parametrize("size", [8, 30])
def test_what_is_known_of_all_counts_for_as_many_rounds_as_the_spread_says(
    spread: float, low: float, high: float, size: int
) -> None:
    """0.7 * 0.3 / 0.1^2 are 21 rounds, and half that deviation four times as many."""
    weights = after(800, size, spread)
    assert low <= sorted(weights)[len(weights) // 2] <= high


def test_the_sum_is_without_bias() -> None:
    """In expectation, by enumeration of five rounds whose share is one of two."""
    expected, share, spread = 0.0, 0.6, 0.2
    for own in (share - spread, share + spread):
        for bits in range(32):
            drafts = [(1, bits >> place & 1) for place in range(5)]
            taken = sum(one for _, one in drafts)
            weight = 0.5 * own**taken * (1.0 - own) ** (5 - taken)
            made = Spread(excess=0.0, rounds=0.0).seen(drafts, share)
            assert made.rounds == 4
            expected += weight * made.excess
    assert expected == pytest.approx(4 * spread**2, abs=1e-12)


def test_rounds_without_a_draft_and_lone_ones_say_nothing() -> None:
    known = Spread()
    assert known.weight == pytest.approx(8.0)
    for drafts in ([], [(0, 0)] * 9, [(1, 1)], [(0, 0), (2, 1)]):
        assert known.seen(drafts, 0.5) is known


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_shares_without_any_chance(share: float) -> None:
    known = Spread()
    for _ in range(300):
        known = known.seen([(1, int(share))] * 6, share)
    assert 4.0 <= known.weight <= 48.0


def test_requests_begin_with_what_others_are_worth() -> None:
    memory = memory_of(plain=0.01, node=0.0001, draft=0.0003)
    pooled = pooled_of(memory)
    pooled.counts = DepthCounts((90.0, 70.0), (70.0, 50.0))
    for weight in (8.0, 40.0):
        pooled.spread = replace(Spread(), excess=50.0 * 0.25 / weight)
        pooled.opening = None
        assert Price().init(memory).kin == pytest.approx(weight - 2.0)
    pooled.counts, pooled.opening = DepthCounts((5.0,), (4.0,)), None
    assert Price().init(memory).kin == 5.0, "no more than there were"
