"""Telling the table of costs and the controllers of finished rounds: of one, or of those for which a plan stood."""

from collections.abc import Sequence
from functools import partial

from monge.engine.cost_learning import learn_all_costs
from monge.engine.parts import Parts
from monge.engine.row import Row, every
from monge.engine.session import Session


def is_told_later(rows: Sequence[Row], parts: Parts) -> bool:
    """Whether nobody is to be told of a round yet: its plans stand, and nothing was looked up that is news to a controller."""
    for row in rows:
        if not row.session.has_standing_plan:
            return False
        last = row.session.records[-1]
        if (last.hindsight or (last.depth and not parts.runs_network(last.drafter))) and _is_news(row.session, parts):
            return False
    return True


def tell(rows: list[Row], parts: Parts, *, isolated: bool) -> int:
    """Tell of the finished rounds that nobody was told of, the table first; how many these are.

    Args:
        rows: Those that shared the rounds.
        parts: The parts.
        isolated: See `run_round`.
    """
    untold = [row.session.untold for row in rows]
    num_told, num_rounds = len(untold[0]), max(row.session.num_rounds for row in rows)
    learn_all_costs(untold, num_rounds - num_told, parts)
    every(rows, partial(_update, parts=parts), isolated=isolated)
    return num_told


def tell_left(rows: list[Row], parts: Parts, *, isolated: bool) -> list[Row]:
    """Tell of rounds whose plans stand no longer, since others have joined or some have left; the rows that got through."""
    if left := [row for row in rows if row.session.untold]:
        tell(left, parts, isolated=isolated)
        return [row for row in rows if row.session.error is None]
    return rows


def _is_news(session: Session, parts: Parts) -> bool:
    controller = parts.planner(session.request.controller).controller
    return controller.is_news(session.controller_state, session.records[-1])


def _update(row: Row, parts: Parts) -> None:
    session = row.session
    records = session.take_untold()
    if session.request.adaptive and session.drafting != "off":
        controller = parts.planner(session.request.controller).controller
        session.controller_state = controller.update_many(session.controller_state, records)
