"""Rounds that were never decoded: records as a chain drafter would have left them."""

from typing import Any

from monge.control.base import AnyController, CostModel, Memory
from monge.core.context import DraftPlan
from monge.core.draws import SeededDraws, TapeDraws
from monge.core.verdict import StepRecord


def chain_round(window: int, accepted: int, **fields: Any) -> StepRecord:
    """A round of a chain with `window` draft tokens."""
    settings: dict[str, Any] = {"token_ids": (0,) * (accepted + 1), "plan": DraftPlan(max_depth=window), **fields}
    return StepRecord(
        num_nodes=window,
        depth=window,
        num_accepted=accepted,
        examined=(1,) * min(window, accepted + 1),
        next_kind="bonus" if accepted == window else "correction",
        **settings,
    )


def windows(controller: AnyController, accepted: list[int], memory: Memory | None = None) -> list[int | None]:
    """The windows planned while so many tokens of each are accepted (never more than there are)."""
    state = controller.init(memory or Memory())
    planned: list[int | None] = []
    for count in accepted:
        plan = controller.plan(state, TapeDraws([0.999] * 10))
        planned.append(plan.max_depth)
        window = plan.max_depth or 0
        state = controller.update(state, chain_round(window, min(count, window), plan=plan))
    return planned


def memory_of(*, plain: float = 1.0, node: float = 0.02, draft: float = 0.08) -> Memory:
    """Memory with a linear cost table."""
    return Memory(CostModel.linear(plain=plain, node=node, draft=draft))


def draws(seed: int = 0) -> SeededDraws:
    return SeededDraws(seed)
