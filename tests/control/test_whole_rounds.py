"""Rounds that run as one: what they cost, and controllers that choose them where they are worth more than stages."""

import math

import pytest

from monge.control.base import CostModel, Memory
from monge.control.cost_whole import WholeCost
from monge.control.on_the_fly import OnTheFly
from monge.control.price import Price
from monge.control.price_forecast import outlook_of
from monge.core.errors import OptionError
from monge.core.verdict import RoundTiming
from tests.control.cost_scripts import kind
from tests.control.scripts import chain_round, draws


def costs_with(plain_rounds: float, *, draft: float = 0.3, learns: bool = False) -> CostModel:
    """Where three levels take 1.3 plain rounds and three drafts 0.9 in stages."""
    costs = CostModel.linear(plain=1.0, node=0.1, draft=draft, learns=learns)
    costs.note_whole(3, plain_rounds)
    return costs


def run(costs: CostModel, seconds: float, *, as_one: bool = True) -> None:
    """A round that is observed, if it is due."""
    if costs.is_due(kind(None, as_one=as_one), seconds):
        (costs.observe_whole if as_one else costs.observe)(timing(3, seconds, 0.0 if as_one else 0.9))


def timing(depth: int, seconds: float, draft_s: float = 0.0) -> RoundTiming:
    return RoundTiming(num_nodes=depth, depth=depth, batch_size=1, context_length=0, draft_s=draft_s, rest_s=seconds - draft_s)


class TestCosts:
    def test_one_depth_of_one_request(self) -> None:
        costs, plain = costs_with(1.2), CostModel.linear(plain=1.0, node=0.1, draft=0.3)
        expected = [1.2 if depth == 3 else plain.round_s(depth) for depth in range(6)]
        assert [costs.round_s(depth) for depth in range(6)] == pytest.approx(expected)
        assert costs.windows_s(5) == pytest.approx(expected)
        assert costs.windows_s(2) == pytest.approx(expected[:3])
        assert costs.round_s(3, 2) == plain.round_s(3, 2)
        assert costs.windows_s(5, 2) == plain.windows_s(5, 2)

    def test_stages_cost_what_they_did(self) -> None:
        costs, plain = costs_with(1.2), CostModel.linear(plain=1.0, node=0.1, draft=0.3)
        assert costs.levels_s(5) == plain.levels_s(5)
        assert costs.draft_s(3) == plain.draft_s(3)

    def test_are_kept(self) -> None:
        assert CostModel.from_dict(costs_with(1.2).as_dict()).whole == WholeCost(3, 1.2)
        assert CostModel.from_dict(CostModel.linear(plain=1.0, node=0.1, draft=0.3).as_dict()).whole is None

    def test_are_learnt_apart(self) -> None:
        costs = costs_with(1.2, learns=True)
        before = costs.levels_s(5)
        for _ in range(200):
            run(costs, 1.76)
        assert costs.round_s(3) == pytest.approx(1.76, rel=1e-3)
        assert costs.levels_s(5) == before

    def test_a_round_that_was_disturbed_counts_for_little(self) -> None:
        costs = costs_with(1.2, learns=True)
        for seconds in (1.2, 1000.0):
            run(costs, seconds)
        assert 1.2 < costs.round_s(3) < 1.1 * 1.2
        for seconds in (math.nan, math.inf, 0.0, -1.0):
            after = costs.round_s(3)
            costs.observe_whole(timing(3, seconds))
            assert costs.round_s(3) == after

    def test_the_first_after_rounds_in_stages_may_only_be_shorter(self) -> None:
        """Its code and weights are not at hand; and the other way round."""
        costs = costs_with(1.2, learns=True)
        run(costs, 2.2, as_one=False)
        for _ in range(20):
            run(costs, 1.8)
            run(costs, 2.8, as_one=False)
        assert costs.round_s(3) == pytest.approx(1.2)
        assert costs.verify_s(3) == pytest.approx(1.3)
        for _ in range(20):
            run(costs, 1.0)
            run(costs, 2.0, as_one=False)
        assert costs.round_s(3) < 1.15
        assert costs.verify_s(3) < 1.29

    def test_tables_that_do_not_learn_stay(self) -> None:
        costs = costs_with(1.2)
        costs.observe_whole(timing(3, 1.0))
        assert costs.whole == WholeCost(3, 1.2)

    def test_drafters_that_run_otherwise_have_none(self) -> None:
        assert costs_with(1.2).of("another").whole is None
        assert costs_with(1.2).without_drafting().whole is None

    @pytest.mark.parametrize(("depth", "plain_rounds"), [(0, 0.5), (3, 0.0), (3, -1.0), (3, math.nan), (3, math.inf)])
    def test_bad_numbers(self, depth: int, plain_rounds: float) -> None:
        with pytest.raises(OptionError, match="rounds as one need a depth >= 1 and a positive time"):
            WholeCost(depth, plain_rounds)


def planned(costs: CostModel, accepted: int, rounds: int = 70) -> list[tuple[int | None, bool]]:
    """Depths that `price` plans, and whether with a stop rule, where of every draft so many tokens are accepted."""
    controller, memory = Price(), Memory(costs)
    state, plans = controller.init(memory), []
    for _ in range(rounds):
        plan = controller.plan(state, draws())
        plans.append((plan.max_depth, plan.stop is not None))
        as_one = plan.stop is None and plan.max_depth == 3
        depth = min(plan.max_depth or 0, 4)
        confidences = () if plan.stop is None else (0.7,) * depth
        record = chain_round(depth, min(accepted, depth), plan=plan, as_one=as_one, confidences=confidences)
        state = controller.update(state, record)
    return plans


class TestPrice:
    def test_runs_rounds_as_one_where_that_is_cheap(self) -> None:
        plans = planned(costs_with(1.1), accepted=2)
        assert plans[0][1], "the first round asks for the network's confidence"
        assert plans[1:31].count((3, False)) == 30
        assert any(stopped for _, stopped in plans[31:]), "and one of 32 does so again"
        assert plans.count((3, False)) > 60

    def test_and_only_to_see_what_they_take_where_they_are_dear(self) -> None:
        plans = planned(costs_with(3.0), accepted=2, rounds=64)
        places = [place for place, plan in enumerate(plans) if plan == (3, False)]
        assert places == [14, 15, 46, 47], "twice in a row, as the first does not count"

    def test_rests_where_neither_pays(self) -> None:
        assert planned(costs_with(2.0), accepted=0).count((0, False)) > 45

    def test_drafts_where_only_rounds_as_one_pay(self) -> None:
        """Stage by stage a token costs as much as a plain round, and its verification comes on top."""
        staged = CostModel.linear(plain=1.0, node=0.1, draft=1.0)
        assert planned(staged, accepted=1).count((0, False)) > 45
        assert planned(costs_with(1.6, draft=1.0), accepted=1).count((3, False)) > 45

    def test_windows_that_it_may_not_plan(self) -> None:
        controller, memory = Price(max_window=2), Memory(costs_with(0.1))
        assert outlook_of(controller.init(memory), controller.max_window).whole is None

    def test_a_batch_runs_in_stages(self) -> None:
        costs = costs_with(0.1)
        costs.batch_size = 2
        controller = Price()
        assert outlook_of(controller.init(Memory(costs)), controller.max_window).whole is None


def test_on_the_fly_takes_the_window_that_is_cheap() -> None:
    for plain_rounds, expected in ((1.1, 3), (3.0, 1)):
        controller = OnTheFly(max_window=5)
        state = controller.init(Memory(costs_with(plain_rounds, draft=0.2)))
        for _ in range(8):
            state = controller.update(state, chain_round(3, 1))
        assert controller.window(state) == expected
