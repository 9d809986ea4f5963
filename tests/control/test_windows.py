"""Controllers that look at accepted tokens only, on scripts; and what all controllers refuse."""

import pytest

from monge.control.base import PromptReader, RoundInfo, SharedState
from monge.control.fsm import CachedFsm, Fsm
from monge.control.latency import Latency
from monge.control.registry import CONTROLLERS, DEPTH_CONTROLLERS
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.prompt import PromptProfile
from monge.core.selection import Member
from monge.laws.draws import TapeDraws
from tests.control.scripts import chain_round, draws, plan_one, updated, windows


def test_fsm() -> None:
    planned = windows(Fsm(first=2, up=2, down=1, max_window=5), [2, 4, 5, 4, 0, 0, 0, 0])
    assert planned == [2, 4, 5, 5, 4, 3, 2, 1]
    assert windows(Fsm(first=1), [0, 0, 1]) == [1, 1, 1]


def test_cached_fsm_hits_misses_and_forgets() -> None:
    controller = CachedFsm(
        machine=(4, 1, 1, 1, 8), max_ending=2, min_ending=2, capacity=2, rate=0.5
    )
    state = controller.init(SharedState())
    plan = lambda state: plan_one(controller, state, TapeDraws([])).max_depth  # noqa: E731
    assert plan(state) == 4
    state = controller.update(state, chain_round(4, 1, token_ids=(7, 8)))
    assert plan(state) == 3  # (7, 8) is new: the machine's window after a rejection
    state = controller.update(state, chain_round(3, 2, token_ids=(5, 7, 8)))
    assert plan(state) == 3  # a hit: two tokens were accepted after (7, 8)
    state = controller.update(state, chain_round(3, 0, token_ids=(7, 8)))
    assert state.accepted == {(7, 8): 1.0}
    assert plan(state) == 2
    for ending in ((1, 2), (3, 4), (7, 8)):
        state = controller.update(state, chain_round(2, 2, token_ids=ending))
    assert list(state.accepted) == [(1, 2), (3, 4)]  # the least recently used ending has gone
    assert plan(state) == plan_one(controller, state, TapeDraws([])).max_depth == state.window


@pytest.mark.parametrize(
    "name", [name for name in DEPTH_CONTROLLERS if "latency" in DEPTH_CONTROLLERS[name].reads]
)
def test_costs_are_asked_for(name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' needs latency"):
        DEPTH_CONTROLLERS.make(name).init(SharedState())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsm(first=9)", r"first must lie in \[1, 8\]; got 9"),
        ("fsm(first=2, min_window=3)", r"first must lie in \[3, 8\]; got 2"),
        ("fsm(min_window=0)", r"min_window must lie in \[1, 8\]; got 0"),
        ("fsm(up=0)", "up must be at least 1; got 0"),
        ("fsm(down=0)", "down must be at least 1; got 0"),
        ("fixed(max_depth=-1)", "max_depth must be >= 0"),
        ("cached_fsm(min_ending=3, max_ending=2)", r"min_ending must lie in \[1, 2\]; got 3"),
        ("cached_fsm(capacity=0)", "capacity must be at least 1; got 0"),
        ("cached_fsm(rate=0)", "rate must be larger than 0"),
        ("on_the_fly(max_window=0)", "max_window must be at least 1; got 0"),
        ("on_the_fly(history=0)", "history must be at least 1; got 0"),
        ("on_the_fly(probe_tokens=0)", "probe_tokens must be at least 1; got 0"),
        ("on_the_fly(probe_prob=1.5)", r"probe_prob must lie in \[0, 1\]"),
        ("on_the_fly(prior=(-1, 0))", "prior must be at least 0; got -1"),
        ("q_learning(windows=())", "windows must be different numbers"),
        ("goodput(max_window=0)", "max_window must be at least 1; got 0"),
        ("goodput(first_cooldown=64, last_cooldown=32)", r"must lie in \[1, 32\]; got 64"),
        ("goodput(first_cooldown=0)", r"first_cooldown must lie in \[1, 1024\]; got 0"),
        ("goodput(probe=0)", "probe must be at least 1; got 0"),
        ("goodput(margin=-0.1)", "margin must be at least 0; got -0.1"),
        ("goodput(batch_margin=-0.1)", "batch_margin must be at least 0; got -0.1"),
    ],
)
def test_impossible_settings(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DEPTH_CONTROLLERS.parse(text)


def trajectory(name: str, times: int) -> list[list[DraftPlan]]:
    """Plans of two requests over many rounds, each round planned so many times.

    Drafting pays at first and then does not, so that pauses, cooldowns and probes occur.
    """
    controller = CONTROLLERS.make(name)
    members = tuple(
        Member(name=name, max_depth=8, runs_network=name == "model") for name in ("ngram", "model")
    )
    latency = Latency.linear(plain=1.0, node=0.1, draft=0.1)
    shared = SharedState(latency, members=members if controller.selects else ())
    states = [controller.init(shared) for _ in range(2)]
    if isinstance(controller, PromptReader):
        states = [controller.read(state, PromptProfile(token_ids=(0, 1))) for state in states]
    plans: list[list[DraftPlan]] = []
    for number in range(120):
        lengths = (number, number + 3)
        info = RoundInfo(context_lengths=lengths, batch_size=2, memory=shared.memory)
        asked = [
            controller.plan(states, info, [draws(2 * number), draws(2 * number + 1)])
            for _ in range(times)
        ]
        assert all(list(one) == list(asked[0]) for one in asked)
        plans.append(list(asked[0]))
        for row, plan in enumerate(plans[-1]):
            window = min(plan.max_depth or 0, 8)
            drafter = plan.drafter or ("model" if window else None)
            facts = {"plan": plan, "batch_size": 2, "drafter": drafter}
            record = chain_round(window, min(window, 2 if number < 10 else 0), **facts)
            states[row] = updated(controller, shared, states[row], record)
    return plans


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_round_that_is_planned_again_after_an_error_uses_nothing_up(name: str) -> None:
    assert trajectory(name, 3) == trajectory(name, 1)
