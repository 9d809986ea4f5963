"""Rounds that were never decoded: records as a chain drafter would have left them."""

from typing import Any

from monge.control.base import AnyController, RoundInfo, SharedState
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws, SeededDraws, TapeDraws


def chain_round(window: int, accepted: int, **fields: Any) -> StepRecord:
    """A round of a chain with `window` draft tokens."""
    settings: dict[str, Any] = {"token_ids": (0,) * (accepted + 1), **fields}
    settings.setdefault("plan", DraftPlan(max_depth=window))
    return StepRecord(
        num_nodes=window,
        depth=window,
        num_accepted=accepted,
        examined=(1,) * min(window, accepted + 1),
        next_kind="bonus" if accepted == window else "correction",
        **settings,
    )


def windows(
    controller: AnyController, accepted: list[int], shared: SharedState | None = None
) -> list[int | None]:
    """The windows planned while so many tokens of each are accepted (never more than there are)."""
    shared = shared or SharedState()
    state = controller.init(shared)
    planned: list[int | None] = []
    for count in accepted:
        plan = plan_one(controller, state, TapeDraws([0.999] * 10), memory=shared.memory)
        planned.append(plan.max_depth)
        window = plan.max_depth or 0
        record = chain_round(window, min(count, window), plan=plan)
        state = updated(controller, shared, state, record)
    return planned


def updated(controller: AnyController, shared: SharedState, state: Any, record: StepRecord) -> Any:
    """The state of a request after a round, from which the controller learns; neither changes what goes in."""
    after = controller.update(state, record)
    memory = controller.learn(shared.memory, after, record)
    assert controller.update(state, record) == after
    assert controller.learn(shared.memory, after, record) == memory
    shared.memory = memory
    return after


def plan_one(
    controller: AnyController,
    state: Any,
    draws: Draws | None = None,
    *,
    length: int = 0,
    batch_size: int = 1,
    memory: Any = None,
) -> DraftPlan:
    """The plan of one request whose text has `length` tokens."""
    info = RoundInfo(context_lengths=(length,), batch_size=batch_size, memory=memory)
    (plan,) = controller.plan([state], info, [draws or TapeDraws([])])
    return plan


def shared_of(*, plain: float = 1.0, node: float = 0.02, draft: float = 0.08) -> SharedState:
    """Shared state with linear latency."""
    return SharedState(Latency.linear(plain=plain, node=node, draft=draft))


def latency_of_rounds(*rounds: tuple[int, int, float], drafter: str | None = None) -> Latency:
    """Latency after rounds of some depth, batch size and seconds, each three times."""
    latency = Latency()
    for depth, batch_size, seconds in (one for one in rounds for _ in range(3)):
        latency.observe(seconds, depth=depth, batch_size=batch_size, drafter=drafter)
    return latency


def draws(seed: int = 0) -> SeededDraws:
    return SeededDraws(seed)
