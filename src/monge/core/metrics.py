"""Derived rates, each defined once, from the records of one or many requests.

A round commits its accepted draft tokens and a `next_token`; `num_accepted` excludes the latter.
Tokens after a stop string count as accepted, because the verifier accepted them, but not as
generated.
"""

from collections.abc import Sequence

from monge.core.errors import MongeError
from monge.core.verdict import StepRecord


def block_efficiency(records: Sequence[StepRecord]) -> float:
    """Tokens verified per target forward: `mean(num_accepted) + 1` (vLLM: "mean acceptance length")."""
    _need(records)
    return 1.0 + sum(record.num_accepted for record in records) / len(records)


def draft_utilisation(records: Sequence[StepRecord]) -> float:
    """Accepted draft tokens / verified draft nodes, which is no acceptance at a depth; 0 if nothing was drafted."""
    _need(records)
    drafted = sum(record.num_nodes for record in records)
    return sum(record.num_accepted for record in records) / drafted if drafted else 0.0


def acceptance_by_depth(records: Sequence[StepRecord]) -> tuple[float, ...]:
    """`alpha_pos`: accepted at depth j / times a node with candidates was reached at depth j - 1, for j = 1, 2, ..."""
    _need(records)
    return tuple(
        sum(record.num_accepted > depth for record in records)
        / sum(len(record.examined) > depth for record in records)
        for depth in range(max(len(record.examined) for record in records))
    )


def acceptance_histogram(records: Sequence[StepRecord]) -> tuple[int, ...]:
    """Rounds that accepted 0, 1, .. draft tokens."""
    _need(records)
    counts = [0] * (1 + max(record.num_accepted for record in records))
    for record in records:
        counts[record.num_accepted] += 1
    return tuple(counts)


def engine_efficiency(records: Sequence[StepRecord]) -> float:
    """Seconds inside network forwards / wall seconds of the rounds (1 = the loop itself costs nothing).

    A round shared by a batch appears in the records of each of its requests; each counts by its
    share. 0 if the clock stood still.
    """
    _need(records)
    forward = sum(record.times.forward_s / record.batch_size for record in records)
    total = sum(record.times.total_s / record.batch_size for record in records)
    return forward / total if total else 0.0


def _need(records: Sequence[StepRecord]) -> None:
    if not records:
        raise MongeError("metrics: no rounds were recorded, so there is nothing to average")
