"""Telling the table of costs and the controllers of finished rounds: of one, or of those for which a plan stood."""

from collections.abc import Sequence
from functools import partial

from monge.engine.cost_learning import learn_costs
from monge.engine.parts import Parts
from monge.engine.row import Row, every


def is_told_later(rows: Sequence[Row], parts: Parts) -> bool:
    """Whether nobody is to be told of a round yet: its plan stands, and nothing was looked up that says how to go on."""
    if len(rows) > 1 or not (session := rows[0].session).has_standing_plan:
        return False
    last = session.records[-1]
    return not last.hindsight and (not last.depth or parts.runs_network(last.drafter))


def tell(rows: list[Row], parts: Parts, *, isolated: bool) -> int:
    """Tell of the finished rounds that nobody was told of, the table first; how many these are.

    Args:
        rows: Those that share a round, each with this one untold, or one request alone.
        parts: The parts.
        isolated: See `run_round`.
    """
    untold = [row.session.untold for row in rows]
    num_told, num_rounds = len(untold[0]), max(row.session.num_rounds for row in rows)
    for place, records in enumerate(zip(*untold, strict=True)):
        learn_costs(records, num_rounds - num_told + place, parts)
    every(rows, partial(_update, parts=parts), isolated=isolated)
    return num_told


def tell_left(row: Row, parts: Parts) -> None:
    """Tell of rounds that a request had alone, before others joined it."""
    if row.session.untold:
        tell([row], parts, isolated=False)


def _update(row: Row, parts: Parts) -> None:
    session = row.session
    records = session.take_untold()
    if session.request.adaptive and session.drafting != "off":
        controller = parts.planner(session.request.controller).controller
        session.controller_state = controller.update_many(session.controller_state, records)
