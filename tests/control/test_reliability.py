"""Forecasts of survival and what became of them, from records alone."""

import pytest

from monge.api import make_components
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.metrics import acceptance_histogram
from monge.core.reliability import forecast_survival, reliability
from monge.core.stopping import StopRule
from monge.engine.decoder import Decoder
from monge.engine.trace import rounds_of
from monge.testing.tabular import RandomTable, TabularModel
from tests.control.scripts import chain_round

FORECASTS = DraftPlan(max_depth=3, stop=StopRule(expected=(0.5,)), price=20.0)


def test_survival_is_the_product_of_the_rules_chances() -> None:
    record = chain_round(3, 1, plan=FORECASTS, confidences=(0.9, 0.5, 0.8))
    assert forecast_survival(record) == pytest.approx((0.9, 0.45, 0.36))
    found = reliability([record])
    assert found is not None
    assert found.num_forecasts == 3
    assert found.brier == pytest.approx((0.1**2 + 0.45**2 + 0.36**2) / 3)
    assert found.calibration_error == pytest.approx((0.1 + 0.45 + 0.36) / 3)
    assert [count for *_, count in found.bins] == [1, 1, 1]
    assert found.bins[-1] == (pytest.approx(0.9), 1.0, 1)


def test_rounds_without_forecasts_count_for_nothing() -> None:
    bare = DraftPlan(max_depth=3, stop=StopRule(draw_prices=(0.0,)))
    assert (
        reliability([chain_round(3, 1), chain_round(3, 1, plan=bare, confidences=(0.9, 0.5, 0.8))])
        is None
    )


def test_honest_forecasts_have_no_calibration_error() -> None:
    plan = DraftPlan(max_depth=1, stop=StopRule(expected=(0.5,)))
    rounds = [
        chain_round(1, int(number < 3), plan=plan, confidences=(0.75,)) for number in range(4)
    ]
    found = reliability(rounds)
    assert found is not None
    assert found.calibration_error == pytest.approx(0.0)
    assert found.brier == pytest.approx(0.75 * 0.25)


def test_histogram_counts_rounds() -> None:
    assert acceptance_histogram([chain_round(3, count) for count in (0, 3, 1, 3)]) == (1, 1, 0, 2)


def test_a_decoded_request_tells_what_price_thought() -> None:
    costs = Latency.linear(plain=1.0, node=0.01, draft=0.05)
    models = TabularModel(RandomTable(5, 3), 5), TabularModel(RandomTable(5, 3), 5)
    parts = make_components(*models, controller="goodput", costs=costs)
    (result,) = Decoder(parts).generate([(1, 2)], max_new_tokens=200, temperature=1.0, seed=0)
    rounds = rounds_of(result.records)
    assert [entry["at"] for entry in rounds] == [
        sum(e["tokens"] for e in rounds[:place]) for place in range(len(rounds))
    ]
    assert rounds[-1]["at"] + rounds[-1]["tokens"] == 200
    drafted = [entry for entry in rounds if entry["depth"] > 0]
    assert all(entry["price"] > 0 for entry in drafted)
    assert all(len(entry["survival"]) in {0, entry["depth"]} for entry in rounds)
    assert any(entry["survival"] for entry in rounds)
    assert sum(result.stats.acceptance_histogram) == len(rounds)
    assert result.stats.survival is not None
    # Draft and target are one network: all is accepted, which the forecasts have found out.
    assert result.stats.survival.brier < 0.1
