"""Requests alone that rest: what is planned for them, and what looked-up candidates say meanwhile."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from monge.control.base import PLAIN
from monge.control.price_forecast import outlook_of
from monge.control.price_looked_up import drafts_of
from monge.control.price_lookups import noted
from monge.control.price_memory import pooled_of
from monge.control.price_request import Request
from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord

STRIDE: Final = 16
"""Tokens by which a request's text may have grown unnoted while it rests."""


def resting_plan(state: Request) -> DraftPlan:
    """What is planned while the network rests."""
    if state.resting_depth is None or pooled_of(state.memory).follows.left(state.resting_depth):
        return PLAIN
    return DraftPlan(max_depth=0, lookup_depth=state.resting_depth, follows=True)


def resting_stands(state: Request, plan: DraftPlan, num_tokens: int) -> int:
    """For how many rounds that holds, where the text has so many tokens."""
    most, depth, follows = STRIDE, state.resting_depth, pooled_of(state.memory).follows
    if depth is not None:
        most = follows.stand(depth) if plan.follows else min(STRIDE, follows.left(depth))
    return min(state.left(num_tokens), most)


def is_resting_news(state: Request, record: StepRecord, max_window: int) -> bool:
    """Whether looked-up candidates did so well or badly in a round that others may be planned."""
    depth = state.resting_depth
    if depth is None or record.batch_size > 1:
        return True
    for examined, taken in drafts_of(record, state.memory.lookups):
        if (depth and not taken) or (taken and depth != max_window and (not depth or taken == examined)):
            return True
    return False


def looked(state: Request, records: Sequence[StepRecord], max_window: int) -> Request:
    """The state after rounds without the network, of which others may have drafted."""
    lookups = state.memory.lookups
    if not lookups or not any(record.depth or record.hindsight for record in records):
        return state
    pooled = pooled_of(state.memory)
    if any(taken > 1 for record in records for _, taken in drafts_of(record, lookups)):
        pooled.follows.found()
    state = replace(state, looked=noted(pooled, state.looked, records, lookups))
    return replace(state, resting_depth=outlook_of(state, max_window).resting_depth)
