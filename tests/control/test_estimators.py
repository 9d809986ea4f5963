"""Estimators, windows and switches.

What they recover, and that they are right where they must be.
"""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.control.acceptance import DepthCounts, expected_tokens
from monge.control.base import SharedState
from monge.control.calibration import Calibration, sequential_temperatures, sigmoid
from monge.control.latency import Latency
from monge.control.on_the_fly import OnTheFly, best_window, censored_acceptance
from monge.control.q_learning import QLearning
from monge.core.draws import SeededDraws
from monge.core.reliability import calibration_error
from monge.core.stopping import StopRule, logit
from tests.control.scripts import chain_round, plan_one, shared_of


def draws(seed: int = 0) -> SeededDraws:
    return SeededDraws(seed)


def accepted_of(window: int, acceptance: float, source: SeededDraws) -> int:
    return next((depth for depth in range(window) if not source.bernoulli(acceptance)), window)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95, 0.98])
@pytest.mark.parametrize("largest", [1, 4, 16])
def test_the_censored_estimate_recovers_acceptance(acceptance: float, largest: int) -> None:
    """Within three standard deviations; the share accepted / drafted is another number."""
    source, rounds = draws(largest), []
    for index in range(4000):
        window = 1 + index % largest
        rounds.append((window, accepted_of(window, acceptance, source)))
    tried = sum(min(window, count + 1) for window, count in rounds)
    deviation = (acceptance * (1 - acceptance) / tried) ** 0.5
    assert abs(censored_acceptance(rounds) - acceptance) < 3 * deviation
    if largest == 16 and 0.3 <= acceptance < 0.9:
        drafted = sum(window for window, _ in rounds)
        assert sum(count for _, count in rounds) / drafted < acceptance - 0.1


def test_what_is_known_of_nothing() -> None:
    assert censored_acceptance([], (3, 1)) == 0.75
    assert censored_acceptance([(2, 2)], (0, 0), 0.98) == 0.98
    assert DepthCounts().acceptance(3) == (0.75, 0.75, 0.75)
    assert DepthCounts().acceptance(2, (0.9, 0.4)) == pytest.approx((0.9, 0.4))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.98, 1.0])
def test_the_best_window_is_the_best(acceptance: float) -> None:
    for node, draft in itertools.product((0.0, 0.02, 0.3), (0.01, 0.1, 1.0)):
        seconds = [1.0 + (node + draft) * window for window in range(17)]
        speeds = [
            sum(acceptance**power for power in range(window + 1)) / seconds[window]
            for window in range(17)
        ]
        window = best_window(acceptance, seconds)
        assert speeds[window] == pytest.approx(max(speeds))
        if acceptance == 0.0 or max(speeds[1:]) < 1.0:
            assert window == 0
        # Costs are convex, so the first window from which another token does not raise the speed is
        # the best one.
        marginal = next(
            (w for w in range(16) if acceptance ** (w + 1) / (node + draft) <= speeds[w]), 16
        )
        assert speeds[marginal] == pytest.approx(max(speeds))


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


@given(st.lists(st.integers(0, 4), max_size=30))
def test_depth_counts_are_shares_of_what_was_reached(script: list[int]) -> None:
    counts = DepthCounts()
    for accepted in script:
        counts = counts.update(chain_round(4, accepted), keep=1.0)
    for depth, (reached, accepted) in enumerate(zip(counts.reached, counts.accepted, strict=True)):
        assert reached == sum(count >= depth for count in script)
        assert accepted == sum(count > depth for count in script)


def test_depth_counts_are_unbiased_while_windows_vary() -> None:
    """Windows that depend on the past only: acceptance by depth is recovered, deep ones too."""
    truth, source, counts, window = (0.9, 0.5, 0.7), draws(), DepthCounts(), 3
    for _ in range(6000):
        accepted = next(
            (depth for depth in range(window) if not source.bernoulli(truth[depth])), window
        )
        counts = counts.update(chain_round(window, accepted), keep=1.0)
        window = 1 + (accepted + window) % 3
    assert counts.acceptance(3) == pytest.approx(truth, abs=0.06)


def test_expected_tokens() -> None:
    assert expected_tokens((0.5, 0.5)) == [1.0, 1.5, 1.75]


def test_calibration_learns_what_confidence_is_worth() -> None:
    """Overconfident by a slope and a bias: the fitted law gives the true acceptance back."""
    source, calibration = draws(), Calibration()
    for index in range(1500):
        confidence = (0.3, 0.6, 0.9)[index % 3]
        truth = sigmoid(0.5 * logit(confidence) - 1.0)
        calibration = calibration.update((confidence,), int(source.bernoulli(truth)), 1)
    rule = StopRule(bias=calibration.bias, slope=calibration.slope)
    for confidence in (0.3, 0.6, 0.9):
        assert rule.acceptance(1, confidence) == pytest.approx(
            sigmoid(0.5 * logit(confidence) - 1.0), abs=0.07
        )


def test_sequential_temperatures_make_survival_honest() -> None:
    """Scores twice too sure: the error of the cumulative product falls, and no order within a depth changes."""
    source, rounds = draws(), []
    for _ in range(4000):
        chances = [0.2 + 0.7 * source.uniform() for _ in range(3)]
        accepted = next((depth for depth in range(3) if not source.bernoulli(chances[depth])), 3)
        rounds.append((tuple(2.0 * logit(chance) for chance in chances), accepted))
    temperatures = sequential_temperatures(rounds)
    assert all(temperature >= 1.2 for temperature in temperatures)

    def error(scales: tuple[float, ...]) -> float:
        products = []
        for scores, _ in rounds:
            product = 1.0
            for score, scale in zip(scores, scales, strict=True):
                product *= sigmoid(score / scale)
            products.append(product)
        return calibration_error(products, [accepted == 3 for _, accepted in rounds])

    assert error(temperatures) < 0.6 * error((1.0, 1.0, 1.0))


def test_honest_scores_of_few_rounds_keep_their_temperature() -> None:
    """The error alone would change four depths of ten, by chance."""
    source, chosen = draws(), []
    for _ in range(25):
        rounds = []
        for _ in range(96):
            chances = [0.2 + 0.7 * source.uniform() for _ in range(3)]
            accepted = next(
                (depth for depth in range(3) if not source.bernoulli(chances[depth])), 3
            )
            rounds.append((tuple(map(logit, chances)), accepted))
        chosen += sequential_temperatures(rounds)
    assert sum(temperature != 1.0 for temperature in chosen) <= 0.1 * len(chosen)


def test_impossible_survivals_are_no_evidence() -> None:
    """So deep that a product of what is all but refused is nothing, and yet all was accepted."""
    assert sequential_temperatures([((-40.0,) * 30, 30)])[-5:] == (1.0,) * 5


def test_the_next_chance_follows_the_last_one() -> None:
    """Each level's chance is that of the level above, and deeper ones are reached the more often the higher that is: means by
    depth rise, what follows a chance does not."""
    source, calibration = draws(), Calibration()
    assert calibration.following is None
    for _ in range(3000):
        chance = (0.2, 0.5, 0.9)[int(3 * source.uniform())]
        accepted = next((depth for depth in range(3) if not source.bernoulli(chance)), 3)
        calibration = calibration.update((chance,) * 3, accepted, min(accepted + 1, 3))
    rule = StopRule(following=calibration.following, expected=(0.53, 0.69, 0.8))
    for chance in (0.2, 0.5, 0.9):
        assert rule.next_acceptance(2, chance) == pytest.approx(chance, abs=0.02)


def test_the_next_chance_is_that_of_levels_that_are_reached() -> None:
    """Where a candidate was refused, the one below it was never in question."""
    calibration = Calibration()
    for number in range(600):
        accepted = number % 2
        confidences = ((0.4, 0.8) if number % 4 < 2 else (0.6, 0.9)) if accepted else (0.5, 0.1)
        calibration = calibration.update(confidences, accepted, 1 + accepted)
    told = calibration.following
    assert told is not None
    law = StopRule(bias=calibration.bias, slope=calibration.slope, following=told)
    for above, below in ((0.4, 0.8), (0.6, 0.9)):
        assert law.next_acceptance(2, law.acceptance(1, above)) == pytest.approx(
            law.acceptance(2, below), abs=0.05
        )


def test_a_shared_budget_may_not_look_ahead() -> None:
    """DSpark, appendix A: whether the first token is verified must not depend on the confidence behind it.

    p = (.7, .3) and q = (.5, .5); submitting the first token only if its successor looks good moves
    the output to (.85, .15). A price that stops at the first level that does not pay decides before
    the token is drawn, and cannot see its successor.
    """
    p, q, steps = (0.7, 0.3), (0.5, 0.5), (1.0, 0.5, 0.45)
    overlap = sum(map(min, p, q))
    emitted = [0.0, 0.0]
    for token in range(2):
        behind = (0.9, 0.0)[token]
        values = [steps[0], (1 + overlap) * steps[1], (1 + overlap + overlap * behind) * steps[2]]
        if max(values) > values[0]:
            keeps = min(1.0, p[token] / q[token])
            emitted[token] += q[token] * keeps
            emitted[0] += q[token] * (1.0 - keeps)  # the residual is all on the first token
        else:
            for other in range(2):
                emitted[other] += q[token] * p[other]
    assert emitted == pytest.approx([0.85, 0.15])
    stop = StopRule(
        draw_prices=tuple(
            (1 / after - 1 / before) * 1.0 for before, after in itertools.pairwise(steps)
        )
    )
    assert not stop.draws(1, overlap)  # the same answer for either token


def test_q_learning_does_not_settle_on_one_token() -> None:
    shared = SharedState(Latency.linear(plain=1.0, node=0.0, draft=0.02))
    controller, source = QLearning(windows=(1, 4)), draws()
    state, chosen = controller.init(shared), []
    for _ in range(3000):
        plan = plan_one(controller, state, source)
        window = plan.max_depth or 0
        chosen.append(window)
        state = controller.update(
            state, chain_round(window, accepted_of(window, 0.8, source), plan=plan)
        )
    assert chosen[-500:].count(4) > 400
