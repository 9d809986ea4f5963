"""A pool, mixed candidates and whole-tree rules under controllers that read the clock, every draw enumerated.

The clock is a fake that moves with the work, and with the tokens that are read: what is planned
then depends on the text.
"""

import math
from typing import Any

import pytest

from monge.api import make_components
from monge.control.latency import Latency
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.runtime.clock import measured_by
from tests.verify.tables import remembered_tables  # noqa: F401

VOCAB = 3
POOL = "pool('ngram(2)', 'model')"
COSTS = {
    "drafting is cheap": Latency.linear(plain=1.0, node=0.05, draft=0.05),
    "drafting is dear": Latency.linear(plain=1.0, node=0.4, draft=0.5),
}


class Clock:
    """Seconds that networks spend, and a few more whenever it is read."""

    seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.01
        return self.seconds


class Timed(TabularModel):
    """A network whose forwards take time by the number of nodes and by their tokens."""

    def __init__(self, seed: int, clock: Clock, weight: float, sizes: set[int]) -> None:
        super().__init__(RandomTable(VOCAB, seed), VOCAB)
        self._clock, self._weight, self._sizes = clock, weight, sizes

    def extend(self, blocks: Any) -> Any:
        for block in blocks.values():
            self._sizes.add(len(block.token_ids))
            work = 1.0 + 0.1 * len(block.token_ids) + 0.5 * sum(block.token_ids)
            self._clock.seconds += self._weight * work
        return super().extend(blocks)


RESTLESS = "goodput(first_cooldown=1, probe=1)"
OPTIMAL = "layer('optimal_given_candidates')"


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(
    ("tree", "verifier", "controller", "horizon"),
    [
        ("fixed_width((2,), 'mixed(1)')", "layer('recursive_rejection')", RESTLESS, 3),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("fixed_width((2, 1), 'mixed(1)')", "layer('greedy')", RESTLESS, 2),
                ("fixed_width((2, 1), 'mixed(1)')", OPTIMAL, RESTLESS, 3),
                ("fixed_width((2, 1), 'mixed(1)')", "layer('recursive_rejection')", "goodput", 3),
            )
        ),
    ],
)
def test_plans_that_follow_the_clock_leave_the_law_alone(
    tree: str, verifier: str, controller: str, horizon: int, costs: str
) -> None:
    clock, sizes = Clock(), set[int]()
    parts = {"drafter": POOL, "tree": tree, "verifier": verifier, "controller": controller}

    def components() -> Components:
        clock.seconds = 0.0
        target, draft = Timed(5, clock, 1.0, sizes), Timed(17, clock, 0.2, set())
        return make_components(target, draft, **parts, latency=COSTS[costs])

    case = Case(prompt=(0, 1, 0, 1, 0), horizon=horizon, max_new_tokens=horizon + 2)
    with measured_by(clock):
        output = output_law(components, case, max_runs=1_000_000)
    assert law_error(output, target_law(TabularModel(RandomTable(VOCAB, 5), VOCAB), case)) < 1e-12
    assert max(sizes) > 1, "something is drafted"
    assert len(sizes) > 1 or costs == "drafting is cheap", (
        "where it is dear, some rounds draft and others do not"
    )


@pytest.mark.parametrize("step", [0.0, -0.5, math.nan, math.inf])
def test_a_clock_that_shows_no_time_stops_nobody(step: float) -> None:
    """Measured under it, and decoded in batches of sizes that were never measured."""
    seconds = 0.0

    def clock() -> float:
        nonlocal seconds
        seconds += step
        return seconds

    target, draft = (TabularModel(RandomTable(VOCAB, seed), VOCAB) for seed in (5, 17))
    with measured_by(clock):
        decoder = Decoder(make_components(target, draft, controller=None))
        results = decoder.generate([(0,)] * 3, max_new_tokens=12, seed=1, controller="goodput")
        results += decoder.generate([(0,)], max_new_tokens=12)
    assert [result.token_ids for result in results] == [results[0].token_ids] * 4
