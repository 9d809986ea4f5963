"""Asking the controllers for the plans of a round."""

from collections.abc import Sequence

from monge.control.base import AnyController, RoundInfo
from monge.core.context import DraftPlan
from monge.engine.parts import Parts
from monge.engine.row import Row


def make_plans(rows: Sequence[Row], parts: Parts, *, batch_size: int, num_waiting: int) -> None:
    """Plans of the requests that draft; the requests of each controller are planned together.

    A request that does not draft, or asks for the largest tree, has no part in a shared budget.
    """
    groups: dict[int, tuple[AnyController, list[Row]]] = {}
    for row in rows:
        if row.session.drafting == "off":
            continue
        if row.session.request.adaptive:
            controller = parts.planner(row.session.request.controller).controller
            groups.setdefault(id(controller), (controller, []))[1].append(row)
        else:
            row.plan = row.session.limit(DraftPlan())
    for controller, group in groups.values():
        info = RoundInfo(
            context_lengths=tuple(len(row.context.token_ids) for row in group), batch_size=batch_size, num_waiting=num_waiting
        )
        plans = controller.plan([row.session.controller_state for row in group], info, [row.session.draws for row in group])
        for row, plan in zip(group, plans, strict=True):
            row.plan = row.session.limit(plan)
