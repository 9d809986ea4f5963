"""The rounds of a request as plain values."""

from collections.abc import Sequence
from typing import Any

from monge.core.verdict import StepRecord


def rounds_of(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Return one entry per round.

    Returns:
        Of every round `at` (tokens generated before it), `window` (largest depth that the plan
        allowed), `depth` and `nodes` (what was drafted within it), `accepted`, `tokens`
        (committed), `drafter` of a pool, `batch_size` and `seconds`.
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
                "drafter": record.drafter,
                "batch_size": record.batch_size,
                "seconds": record.times.total_s,
            }
        )
        at += len(record.token_ids)
    return entries
