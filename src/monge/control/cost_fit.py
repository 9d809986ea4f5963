"""From a few measured rounds to a table of costs: what decides is the difference of two entries, which noise hides first."""

import math
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Final

_TO_SIGMA: Final = 1.4826
"""Standard deviation of a normal law for a median absolute deviation of one."""
_OF_MEDIAN: Final = 1.2533
"""Standard error of a median for that of a mean, under a normal law."""
_SIGNIFICANT: Final = 3.0
"""Standard errors within which an entry's distance from the line is taken for noise."""
_FEW: Final = 2
"""Turns that do not show how noisy they are."""
_UNKNOWN: Final = 0.1
"""Noise that is assumed then, as a share of a time."""
_POINTS: Final = 3
"""Entries that a line needs to say something about one of them."""


def fitted(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seconds by size, from rounds that took turns: every size once in each turn.

    What a whole turn took longer than others is taken out (a median polish of the logarithms, by the lower one of two middle
    times: what disturbs a round makes it longer), and an entry is then drawn to the line through all of size 1 and more, the
    closer the less its distance stands out from what is left of the noise: a step that is real stays, one that may be chance
    does not make a level look dear that nobody will then visit again.

    Args:
        samples: By size (nodes, or levels; 0 stands apart) its seconds, turn by turn. Where one is 0, as drafts without a
            network are by a coarse clock, the medians are returned.

    Reference:
        Median polish: J. W. Tukey, *Exploratory Data Analysis*, 1977. Shrinking: positive part of James and Stein, 1961.
    """
    if any(one <= 0.0 for times in samples.values() for one in times):
        return {size: median(times) for size, times in samples.items()}
    logs = {size: [math.log(one) for one in times] for size, times in samples.items()}
    centres = {size: median_low(times) for size, times in logs.items()}
    turns = range(max(map(len, logs.values())))
    slower = [median(times[turn] - centres[size] for size, times in logs.items() if turn < len(times)) for turn in turns]
    left = {size: [one - turn for one, turn in zip(times, slower, strict=False)] for size, times in logs.items()}
    levels = {size: median_low(times) for size, times in left.items()}
    sigma = _TO_SIGMA * median(abs(one - levels[size]) for size, times in left.items() for one in times)
    if len(turns) <= _FEW:
        sigma = max(sigma, _UNKNOWN)
    values = {size: math.exp(level) for size, level in levels.items()}
    drafting = {size: value for size, value in values.items() if size > 0}
    if len(drafting) >= _POINTS:
        errors = {size: _OF_MEDIAN * sigma / math.sqrt(len(left[size])) for size in drafting}
        values |= _drawn_to_line(drafting, errors)
    return values


def _drawn_to_line(values: Mapping[int, float], errors: Mapping[int, float]) -> dict[int, float]:
    """The values, closer to the line that fits them best.

    Args:
        values: By size.
        errors: Standard error of each, as a share of it.
    """
    weights = {size: 1.0 / value**2 for size, value in values.items()}  # errors are shares of the values
    total = sum(weights.values())
    middle = sum(weight * size for size, weight in weights.items()) / total
    height = sum(weight * values[size] for size, weight in weights.items()) / total
    spread = sum(weight * (size - middle) ** 2 for size, weight in weights.items())
    slope = sum(weight * (size - middle) * (values[size] - height) for size, weight in weights.items()) / spread
    line = {size: height + slope * (size - middle) for size in values}
    if min(line.values()) <= 0.0:
        return dict(values)
    drawn: dict[int, float] = {}
    for size, value in values.items():
        away, noise = value - line[size], _SIGNIFICANT * errors[size] * line[size]
        drawn[size] = line[size] + (away * max(0.0, 1.0 - (noise / away) ** 2) if away else 0.0)
    return drawn
