"""Asking the controllers for the plans of a round."""

from collections.abc import Sequence

from monge.control.base import AnyController
from monge.core.context import DraftPlan
from monge.engine.parts import Parts
from monge.engine.row import Row


def plans_stand(rows: Sequence[Row]) -> bool:
    """Whether the plans of all requests stand, which they do while the same share a round."""
    num_together = len(rows)
    return all(row.session.stands_among(num_together) for row in rows)


def make_plans(rows: Sequence[Row], parts: Parts) -> None:
    """Plans of those that draft: each controller plans for its own together.

    Who does not draft, or wants the largest tree, has no part in a budget that is shared. Plans that stand are not asked for
    again.
    """
    if plans_stand(rows):
        for row in rows:
            row.plan = row.session.standing_plan()
        return
    drafting, groups = [row for row in rows if row.session.drafting != "off"], dict[int, tuple[AnyController, list[Row]]]()
    for row in drafting:
        if row.session.request.adaptive:
            controller = parts.planner(row.session.request.controller).controller
            groups.setdefault(id(controller), (controller, []))[1].append(row)
        else:
            row.plan = row.session.limit(DraftPlan())
    for controller, group in groups.values():
        states, draws = [row.session.controller_state for row in group], [row.session.draws for row in group]
        plans = controller.plan_many(states, draws)
        for row, plan in zip(group, plans, strict=True):
            row.plan = row.session.limit(plan)
        if len(group) == len(rows):
            num_rounds = controller.stands(states, plans, [len(row.context.token_ids) for row in group])
            for row in group:
                row.session.stand(row.plan, num_rounds, len(rows))
