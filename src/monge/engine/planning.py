"""Asking the controllers for the plans of a round."""

from collections.abc import Sequence

from monge.control.base import AnyController
from monge.core.context import DraftPlan
from monge.engine.parts import Parts
from monge.engine.row import Row


def make_plans(rows: Sequence[Row], parts: Parts) -> None:
    """Plans of those that draft: each controller plans for its own together.

    Who does not draft, or wants the largest tree, has no part in a budget that is shared. A plan that stands is not asked for
    again while the request is alone.
    """
    if len(rows) == 1 and (standing := rows[0].session.standing_plan()) is not None:
        rows[0].plan = standing
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
        if len(rows) == 1:
            session, num_tokens = rows[0].session, len(rows[0].context.token_ids)
            session.stand(rows[0].plan, controller.stands(states[0], plans[0], num_tokens))
