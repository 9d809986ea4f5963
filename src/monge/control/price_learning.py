"""What `price` learns of a request from its rounds."""

from collections.abc import Sequence
from dataclasses import replace

from monge.control.base import Memory, costs_of
from monge.control.price_lookups import noted
from monge.control.price_memory import pooled_of
from monge.control.price_outlook import measured_rounds, predicted_seconds
from monge.control.price_request import Request
from monge.control.survival import REQUEST_KEEP
from monge.core.verdict import StepRecord


def learnt(state: Request, further: Sequence[StepRecord] = (), *, begins: bool = False) -> Request:
    """The state after learning from the rounds of its stretch, which ends; what was expected before is no longer.

    Args:
        state: The request.
        further: Further rounds, which drafted.
        begins: Whether a spell begins with the first of them, see `Spells`.
    """
    stretch, lookups = state.stretch, state.memory.lookups
    records = [] if stretch is None else [*stretch.records]
    num_taught, debt_s = (0, state.debt_s) if stretch is None else (stretch.num_taught, stretch.debt_s)
    for record in further:
        records.append(record)
        debt_s = _debt_after(state, record, debt_s)
        pooled_of(state.memory).debt_s = debt_s
    if not records:
        return state if stretch is None else replace(state, outlook=None, stretch=None)
    pooled, spent_s = pooled_of(state.memory), _all_seconds(state.memory, records)
    begins = begins if stretch is None or not stretch.records else stretch.begins and not num_taught
    pooled.learn(records[num_taught:], spent_s[num_taught:], begins=begins, lookups=lookups)
    for one in records:
        if one.batch_size > 1:
            pooled.crowd = pooled.crowd.met(one.num_accepted + 1, *measured_rounds(state.memory, one))
    drafts = [(len(one.examined), one.num_accepted) for one in records if one.drafter not in lookups]
    counts = state.counts.seen(drafts, REQUEST_KEEP)
    looked = noted(pooled, state.looked, records, lookups, num_taught) if lookups else state.looked
    if stretch is not None:
        stretch.num_taught = len(stretch.records)
        pooled.stretches = [one for one in pooled.stretches if one is not stretch]
    return replace(
        state,
        counts=counts,
        debt_s=debt_s,
        context_length=records[-1].context_length + len(records[-1].token_ids),
        trial_left=max(0, state.trial_left - len(records)),
        rounds_on=state.rounds_on + len(records),
        outlook=None,
        stretch=None,
        was_shared=records[-1].batch_size > 1,
        looked=looked,
    )


def teach_left(memory: Memory) -> None:
    """Let requests learn from stretches in which others have ended, or are."""
    pooled = pooled_of(memory)
    for stretch in pooled.stretches:
        if stretch.num_taught < len(stretch.records):
            records, begins = stretch.records[stretch.num_taught :], stretch.begins and not stretch.num_taught
            pooled.learn(records, _all_seconds(memory, records), begins=begins, lookups=memory.lookups)
            noted(pooled, pooled.looked, records, memory.lookups)
            pooled.debt_s, stretch.num_taught = stretch.debt_s, len(stretch.records)
    pooled.stretches = []


def _all_seconds(memory: Memory, records: Sequence[StepRecord]) -> list[float]:
    """Predicted seconds of rounds of a request; of alike ones one is looked up, since texts hardly grow meanwhile."""
    known = dict[tuple[object, ...], float]()
    found = list[float]()
    for one in records:
        kind = one.as_one, one.drafter, one.depth, one.num_nodes, one.levels_read, one.batch_size
        if kind not in known:
            known[kind] = predicted_seconds(memory, one)
        found.append(known[kind])
    return found


def _debt_after(state: Request, record: StepRecord, debt_s: float) -> float:
    """The debt of a request after a round that drafted; those who share rounds have none of their own."""
    if record.batch_size > 1:
        return 0.0
    if record.drafter in state.memory.lookups:
        return debt_s
    plain_s = costs_of(state.memory, "price").verify_s(0, 1, record.context_length)
    return max(0.0, debt_s + predicted_seconds(state.memory, record) - plain_s * (record.num_accepted + 1))
