"""Tables of costs from a few noisy rounds: differences of entries decide, so they are what has to be right."""

import random
from statistics import median

import pytest

from monge.control.cost_fit import fitted

LINE = {0: 10.0, 1: 13.0, 2: 13.5, 4: 14.5, 8: 16.5}


def noisy(truth: dict[int, float], turns: int, noise: float, seed: int) -> dict[int, list[float]]:
    rng = random.Random(seed)
    slower = [1.0 + 0.3 * rng.random() for _ in range(turns)]
    return {size: [value * slow * rng.lognormvariate(0.0, noise) for slow in slower] for size, value in truth.items()}


def test_what_a_whole_turn_took_longer_is_taken_out() -> None:
    """Medians alone would be those of different turns where a turn was cut short."""
    samples = {size: [value * slow for slow in (1.0, 1.0, 2.0, 1.0)] for size, value in LINE.items()}
    samples[8] = samples[8][:3]
    assert fitted(samples) == pytest.approx(LINE)


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_differences_of_entries_are_nearer_to_the_truth_than_those_of_medians(turns: int) -> None:
    ours = medians = 0.0
    for seed in range(200):
        samples = noisy(LINE, turns, 0.05, seed)
        plain, table = {size: median(times) for size, times in samples.items()}, fitted(samples)
        for low, high in ((1, 2), (2, 4), (4, 8)):
            wanted = (LINE[high] - LINE[low]) / LINE[0]
            ours += ((table[high] - table[low]) / table[0] - wanted) ** 2
            medians += ((plain[high] - plain[low]) / plain[0] - wanted) ** 2
    assert ours < 0.6 * medians


def test_a_step_that_stands_out_stays() -> None:
    """From the fifth node on a forward of some runtimes takes half as long again."""
    steps = {0: 4.0, 1: 4.5, 2: 4.8, 4: 8.2, 8: 8.5}
    table = fitted(noisy(steps, 4, 0.01, 3))
    assert table[4] / table[2] == pytest.approx(8.2 / 4.8, rel=0.05)
    assert table[8] / table[4] == pytest.approx(8.5 / 8.2, rel=0.05)


@pytest.mark.parametrize("turns", [2, 3, 4])
def test_one_disturbed_turn_of_an_entry_does_not_make_it_dear(turns: int) -> None:
    for size in (0, 2, 4):
        samples = noisy(LINE, turns, 0.01, 5)
        samples[size][turns - 1] *= 2.0
        table = fitted(samples)
        assert table[4] / table[2] == pytest.approx(LINE[4] / LINE[2], rel=0.03)
        assert table[1] / table[0] == pytest.approx(LINE[1] / LINE[0], rel=0.03)


def test_two_sizes_make_no_line_and_plain_rounds_are_on_none() -> None:
    assert fitted({0: [5.0, 5.0, 5.0], 1: [2.0, 2.0, 2.0], 2: [9.0, 9.0, 9.0]}) == pytest.approx({0: 5.0, 1: 2.0, 2: 9.0})
    assert fitted({0: [4.0]}) == pytest.approx({0: 4.0})


def test_times_of_zero_are_times() -> None:
    """A clock may be too coarse for a draft that costs nothing, and the table takes zeros there."""
    assert fitted({0: [0.0, 0.0], 1: [0.0, 0.2], 2: [0.3, 0.1]}) == pytest.approx({0: 0.0, 1: 0.1, 2: 0.2})


def test_a_line_that_falls_below_zero_is_not_followed() -> None:
    steep = {1: 0.3, 2: 0.1, 4: 0.1, 30: 10.0}
    assert fitted({size: [value] for size, value in steep.items()}) == pytest.approx(steep)
