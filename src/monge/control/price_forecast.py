"""What `price` expects of a request's coming round."""

from monge.control.base import costs_of
from monge.control.price_lookups import lookups_of
from monge.control.price_memory import pooled_of
from monge.control.price_outlook import Outlook
from monge.control.price_request import Request
from monge.control.survival import PRIOR_WEIGHT, expected_tokens

FIRST_WEIGHT = 4.0
"""Rounds that the first guess of acceptance counts for."""


def outlook_of(state: Request, max_window: int) -> Outlook:
    """Expected tokens and seconds of the coming round's windows, the largest being `max_window`."""
    costs, pooled = costs_of(state.memory, "price"), pooled_of(state.memory)
    deepest = costs.within(max_window)
    usual = pooled.counts.acceptance(deepest, weight=FIRST_WEIGHT)
    acceptance = state.counts.acceptance(deepest, usual, PRIOR_WEIGHT + state.kin)
    context = costs.context_length if state.context_length is None else state.context_length
    drafting, verifying = costs.levels_s(deepest, costs.batch_size, context)
    seconds = [sum(both) for both in zip(drafting, verifying, strict=True)]
    whole, price = costs.whole, max(pooled.speed, 1.0 / seconds[0])
    fits = whole is not None and costs.batch_size == 1 and whole.depth <= deepest
    as_one = (whole.depth, whole.plain_rounds * seconds[0]) if whole is not None and fits else None
    return Outlook.of(
        acceptance,
        expected_tokens(acceptance),
        seconds=seconds,
        verifying=verifying,
        price=price,
        whole=as_one,
        lookups=lookups_of(state, max_window, context, verifying),
    )
