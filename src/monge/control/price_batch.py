"""Whether requests that share rounds draft together, and how deep: all wait for the deepest draft."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from monge.control.base import CostModel

TRIAL_ROWS = 4
"""Requests that draft in a trial of a batch."""
_KEEP = 0.97  # weight that a request's round keeps with every later one, in what drafting was seen to gain


@dataclass(frozen=True, slots=True)
class Crowd:
    """How the requests that share rounds stand with drafting.

    Args:
        is_on: Whether they draft, or would if it paid; not yet in a trial.
        off_tokens: Tokens of each request that a rest lasts, or last did; 0 once drafting has gone well for a while.
        rested: How many of these are decoded.
        rounds_on: Rounds since they were switched on.
        tokens: Tokens of requests in rounds that drafted since the last rest, the latest counting most.
        plain_rounds: How many plain rounds would have taken as long.
        dearest: How many the longest of these rounds took, with the text that was read for it.
    """

    is_on: bool = True
    off_tokens: int = 0
    rested: int = 0
    rounds_on: int = 0
    tokens: float = 0.0
    plain_rounds: float = 0.0
    dearest: float = 0.0

    @property
    def gain(self) -> float:
        """Tokens for one of plain decoding, as measured."""
        return self.tokens / self.plain_rounds if self.plain_rounds else float("inf")

    @property
    def is_resting(self) -> bool:
        """Whether a rest is not over yet."""
        return not self.is_on and self.rested < self.off_tokens

    @property
    def awaits_trial(self) -> bool:
        """Whether nobody has drafted since the rest began; once somebody has, what it was seen to gain decides."""
        return not self.is_on and not self.plain_rounds

    def met(self, tokens: int, plain_rounds: float, with_reading: float) -> "Crowd":
        """After one request's part of a round, which took so many plain ones without and with the text read for it."""
        return replace(
            self,
            tokens=_KEEP * self.tokens + tokens,
            plain_rounds=_KEEP * self.plain_rounds + plain_rounds,
            dearest=max(self.dearest, with_reading),
        )


def tried(lengths: Sequence[int]) -> set[int]:
    """Who drafts in a trial, whose neighbours go on plainly: a few of those with the shortest texts.

    For a trial the draft model reads what it has missed, and with many requests that takes many times as long as the round.

    Args:
        lengths: Tokens of every request's text.

    Returns:
        Their places.
    """
    return set(sorted(range(len(lengths)), key=lengths.__getitem__)[:TRIAL_ROWS])


def batch_seconds(costs: CostModel, deepest: int, num_rows: int, context: int | None) -> list[float]:
    """Seconds of a round of a batch by depth, from 0 on."""
    return [sum(both) for both in zip(*costs.levels_s(deepest, num_rows, context), strict=True)]


def batch_gains(
    costs: CostModel, seconds: Sequence[float], tokens: Sequence[Sequence[float]], num_rows: int, context: int | None
) -> list[float]:
    """How much faster than plain decoding a batch is expected to be done, by depth of the draft.

    A plain round takes `fixed + num_rows * per_row` seconds. A request that gets on faster than its neighbours leaves early,
    which saves its `per_row` of the rounds that are left, while `fixed` is paid until the slowest one has ended. Only where
    others wait for its place is all of its share saved.

    Args:
        costs: What rounds cost.
        seconds: Of a round, by depth from 0 on.
        tokens: Expected tokens of every request that drafts, by depth; the others write one.
        num_rows: Requests that share the round.
        context: Tokens of the longest text, if known.

    Returns:
        By depth, seconds of plain decoding that a round saves over its own; 1 for depth 0.
    """
    idle, plain = num_rows - len(tokens), seconds[0]
    if costs.num_waiting:
        per_row = plain / num_rows
    else:
        per_row = min(max((plain - costs.verify_s(0, 1, context)) / (num_rows - 1), 0.0), plain / num_rows)
    fixed = plain - per_row * num_rows
    gains: list[float] = []
    for depth, spent in enumerate(seconds):
        gained = [own[depth] for own in tokens]
        slowest = 1.0 if idle else min(gained)
        gains.append((fixed * slowest + per_row * (sum(gained) + idle)) / spent)
    return gains
