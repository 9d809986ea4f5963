"""Looked-up drafts that rounds decided about."""

from collections.abc import Container

from monge.core.verdict import StepRecord


def drafts_of(record: StepRecord, lookups: Container[str | None]) -> list[tuple[int, int]]:
    """Of each looked-up draft that a round decided about, how many depths were reached, and how many accepted.

    These are the round's own candidates, and those of earlier places that the text has decided about since: of several drafters
    that would have drafted there, the first would have.
    """
    drafts = [(len(record.examined), record.num_accepted)] if record.depth and record.drafter in lookups else []
    position = -1
    for entry in record.hindsight:
        if entry.num_nodes and entry.position != position:
            position = entry.position
            drafts.append((len(entry.factors), int(sum(entry.factors))))
    return drafts
