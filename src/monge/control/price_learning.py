"""What `price` learns of a request from its rounds."""

from dataclasses import replace

from monge.control.base import Memory, costs_of
from monge.control.price_lookups import noted
from monge.control.price_memory import REQUEST_KEEP, pooled_of
from monge.control.price_outlook import measured_rounds, predicted_seconds
from monge.control.price_request import Request
from monge.core.verdict import StepRecord

_SHORT_KEEP = 0.85  # weight that a round keeps with every later one, in the speed that decides whether speculation goes on


def learnt(state: Request, record: StepRecord | None = None, *, begins: bool = False) -> Request:
    """The state after learning from the rounds of its stretch, which ends; what was expected before is no longer.

    Args:
        state: The request.
        record: A further round, which drafted.
        begins: Whether a spell begins with it, see `Spells`.
    """
    stretch = state.stretch
    records = [] if stretch is None else [*stretch.records]
    num_taught, debt_s = (0, state.debt_s) if stretch is None else (stretch.num_taught, stretch.debt_s)
    if record is not None:
        records.append(record)
        debt_s = _debt_after(state, record, debt_s)
        pooled_of(state.memory).debt_s = debt_s
    if not records:
        return state if stretch is None else replace(state, outlook=None, stretch=None)
    pooled, counts, tokens, seconds = pooled_of(state.memory), state.counts, state.tokens, state.seconds
    lookups, looked = state.memory.lookups, state.looked
    for number, one in enumerate(records):
        its_seconds, looked_up = predicted_seconds(state.memory, one), one.drafter in lookups
        if number >= num_taught:
            pooled.learn(one, its_seconds, begins=begins, looked_up=looked_up)
        if one.batch_size > 1:
            pooled.crowd = pooled.crowd.met(one.num_accepted + 1, *measured_rounds(state.memory, one))
        if lookups:
            looked = noted(pooled, looked, one, looked_up=looked_up)
        if looked_up:
            continue
        counts = counts.update(one, REQUEST_KEEP)
        tokens = _SHORT_KEEP * tokens + one.num_accepted + 1
        seconds = _SHORT_KEEP * seconds + its_seconds
    if stretch is not None:
        stretch.num_taught = len(stretch.records)
    return replace(
        state,
        counts=counts,
        tokens=tokens,
        seconds=seconds,
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
    """Let requests learn from the last stretch of one that has ended in it."""
    pooled = pooled_of(memory)
    if (stretch := pooled.stretch) is not None and stretch.num_taught < len(stretch.records):
        for record in stretch.records[stretch.num_taught :]:
            looked_up = record.drafter in memory.lookups
            pooled.learn(record, predicted_seconds(memory, record), begins=False, looked_up=looked_up)
        pooled.debt_s, stretch.num_taught = stretch.debt_s, len(stretch.records)


def _debt_after(state: Request, record: StepRecord, debt_s: float) -> float:
    """The debt of a request after a round that drafted; those who share rounds have none of their own."""
    if record.batch_size > 1:
        return 0.0
    if record.drafter in state.memory.lookups:
        return debt_s
    plain_s = costs_of(state.memory, "price").verify_s(0, 1, record.context_length)
    return max(0.0, debt_s + predicted_seconds(state.memory, record) - plain_s * (record.num_accepted + 1))
