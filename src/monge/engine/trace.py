"""A request round by round, as plain values.

What was planned, what it was worth, what came of it.
"""

from collections.abc import Sequence
from typing import Any

from monge.core.reliability import forecast_survival
from monge.core.verdict import StepRecord


def rounds_of(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """One entry per round.

    Returns:
        Of every round `at` (tokens generated before it), `window` (largest depth that the plan
        allowed), `depth` and `nodes` (what was drafted within it), `accepted`, `tokens`
        (committed), `price` (of a second, in tokens) and `survival` (a forecast by depth) where the
        controller says so, `drafter` of a pool, `batch_size` and `seconds`.
    """
    entries: list[dict[str, Any]] = []
    at = 0
    for record in records:
        entries.append(
            {
                "at": at,
                "window": record.plan.max_depth,
                "depth": record.depth,
                "nodes": record.num_nodes,
                "accepted": record.num_accepted,
                "tokens": len(record.token_ids),
                "price": record.plan.price,
                "survival": list(forecast_survival(record)),
                "drafter": record.drafter,
                "batch_size": record.batch_size,
                "seconds": record.times.total_s,
            }
        )
        at += len(record.token_ids)
    return entries
