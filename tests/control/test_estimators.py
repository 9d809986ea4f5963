"""Estimators of acceptance and seconds, and the windows that follow from them."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from monge.control.acceptance import DepthCounts, argmax, speeds
from monge.control.base import SharedState
from monge.control.latency import Latency
from monge.control.on_the_fly import OnTheFly, censored_acceptance
from monge.control.q_learning import QLearning
from monge.laws.draws import SeededDraws
from tests.control.scripts import chain_round, draws, plan_one, shared_of


def accepted_of(window: int, acceptance: Sequence[float], source: SeededDraws) -> int:
    """Draft tokens that are accepted, given the acceptance of every depth."""
    return next((at for at in range(window) if not source.bernoulli(acceptance[at])), window)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95, 0.98])
@pytest.mark.parametrize("largest", [1, 4, 16])
def test_the_censored_estimate_recovers_acceptance(acceptance: float, largest: int) -> None:
    """Within three standard deviations; the share accepted / drafted is another number."""
    source, rounds = draws(largest), []
    for index in range(4000):
        window = 1 + index % largest
        rounds.append((window, accepted_of(window, (acceptance,) * largest, source)))
    tried = sum(min(window, count + 1) for window, count in rounds)
    deviation = (acceptance * (1 - acceptance) / tried) ** 0.5
    assert abs(censored_acceptance(rounds) - acceptance) < 3 * deviation
    if largest == 16 and 0.3 <= acceptance < 0.9:
        drafted = sum(window for window, _ in rounds)
        assert sum(count for _, count in rounds) / drafted < acceptance - 0.1


def test_estimates_without_observations_are_the_prior() -> None:
    assert censored_acceptance([], (3, 1)) == 0.75
    assert censored_acceptance([(2, 2)], (0, 0), 0.98) == 0.98
    assert DepthCounts().acceptance(3) == (0.75, 0.75, 0.75)
    assert DepthCounts().acceptance(2, (0.9, 0.4)) == pytest.approx((0.9, 0.4))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.98, 1.0])
def test_the_best_window_is_the_best(acceptance: float) -> None:
    for node, draft in itertools.product((0.0, 0.02, 0.3), (0.01, 0.1, 1.0)):
        seconds = [1.0 + (node + draft) * window for window in range(17)]
        expected = [
            sum(acceptance**power for power in range(window + 1)) / seconds[window]
            for window in range(17)
        ]
        window = argmax(speeds(acceptance, seconds))
        assert expected[window] == pytest.approx(max(expected))
        if acceptance == 0.0 or max(expected[1:]) < 1.0:
            assert window == 0
        # Costs are convex, so the first window from which another token does not raise the speed is
        # the best one.
        marginal = next(
            (w for w in range(16) if acceptance ** (w + 1) / (node + draft) <= expected[w]), 16
        )
        assert expected[marginal] == pytest.approx(max(expected))


def test_on_the_fly_rests_and_probes() -> None:
    controller, shared = OnTheFly(probe_tokens=3), shared_of(draft=0.5)
    state = controller.init(shared)
    for _ in range(8):
        state = controller.update(state, chain_round(1, 0))
    planned = []
    for _ in range(5):
        plan = plan_one(controller, state, draws())
        planned.append(plan.max_depth)
        state = controller.update(state, chain_round(plan.max_depth or 0, 0))
    assert planned == [0, 0, 0, 1, 0]


def test_a_path_accepted_to_its_end_rejects_nothing() -> None:
    """Though another path of the tree was deeper."""
    controller = OnTheFly()
    state = controller.init(shared_of())
    for kind in ("bonus", "bonus", "correction"):
        state = controller.update(state, replace(chain_round(5, 1), next_kind=kind))
    assert censored_acceptance(state.rounds) == pytest.approx(3 / 4)


def test_depth_counts_are_unbiased_while_windows_vary() -> None:
    """Windows that depend on the past only: acceptance by depth is recovered, deep ones too."""
    truth, source, counts, window = (0.9, 0.5, 0.7), draws(), DepthCounts(), 3
    for _ in range(6000):
        accepted = accepted_of(window, truth, source)
        counts = counts.update(min(window, accepted + 1), accepted, keep=1.0)
        window = 1 + (accepted + window) % 3
    assert counts.acceptance(3) == pytest.approx(truth, abs=0.06)


def test_q_learning_does_not_settle_on_one_token() -> None:
    shared = SharedState(Latency.linear(plain=1.0, node=0.0, draft=0.02))
    controller, source = QLearning(windows=(1, 4)), draws()
    state, chosen = controller.init(shared), []
    for _ in range(3000):
        plan = plan_one(controller, state, source)
        window = plan.max_depth or 0
        chosen.append(window)
        accepted = accepted_of(window, (0.8,) * 4, source)
        state = controller.update(state, chain_round(window, accepted, plan=plan))
    assert chosen[-500:].count(4) > 400
