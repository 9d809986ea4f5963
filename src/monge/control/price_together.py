"""How `price` plans for requests that share rounds."""

from collections.abc import Sequence
from dataclasses import replace

from monge.control.base import PLAIN, costs_of
from monge.control.price_batch import TRIAL_ROWS, Crowd, batch_gains, batch_seconds, tried
from monge.control.price_forecast import outlook_of
from monge.control.price_memory import pooled_of
from monge.control.price_outlook import stop_rule, unstopped
from monge.control.price_request import Request
from monge.control.price_rests import Rests
from monge.core.context import DraftPlan

GAIN = 1.1
"""What drafting must promise a batch that does not draft yet, as it pays at once and gains only in the end."""
SETTLED = 8
"""Rounds after which requests that speculate again count as settled."""
_BASELINE = 256  # rounds of which the last few are plain: the batch's size and the length of its texts change
_STEEP = 4  # how much longer a batch rests after a trial that failed: several of its requests were tried at once
_READING = 8  # how much faster than one by one the draft model is taken to read tokens, until it is known better
_TRIAL_DEPTH = 2  # of a batch, which waits for it


def plan_together(states: Sequence[Request], num_rows: int, max_window: int, rests: Rests) -> list[DraftPlan]:
    """One depth for all, the one for which the batch is expected to be done soonest.

    Args:
        states: The requests that are planned.
        num_rows: All that share the round.
        max_window: Largest window.
        rests: How long they rest where drafting does not pay.
    """
    memory = states[0].memory
    pooled, costs = pooled_of(memory), costs_of(memory, "price")
    crowd, plans = pooled.crowd, [PLAIN] * len(states)
    if crowd.is_resting:
        pooled.rest_together()
        return plans
    # Neighbours are evidence enough here: what requests before them did would hide that these differ.
    outlooks = [state.outlook or outlook_of(replace(state, kin=0.0), max_window) for state in states]
    lengths = [costs.context_length if one.context_length is None else one.context_length for one in states]
    context = max(lengths)
    seconds = batch_seconds(costs, costs.within(max_window), num_rows, context)
    gains = batch_gains(costs, seconds, [outlook.tokens for outlook in outlooks], num_rows, context)
    depth = max(range(1, len(gains)), key=gains.__getitem__)
    drafting = set(range(len(states)))
    if crowd.awaits_trial:
        depth, drafting = min(depth, _TRIAL_DEPTH), tried(lengths)
    elif min(gains[depth], crowd.gain) < (GAIN if crowd.rounds_on < SETTLED else 1.0 + (GAIN - 1.0) / 2.0):
        # While it rests the draft model reads nothing, so a trial reads the texts of those who draft in it.
        unread_s = max(costs.catch_up_s, min(1.0, TRIAL_ROWS / num_rows) * context * costs.draft_s(1, num_rows) / _READING)
        expected_s = seconds[min(depth, _TRIAL_DEPTH)] - seconds[0] + unread_s
        # One round that took long may have been disturbed: it says how far rests may grow, not how fast.
        longest = rests.longest(max(expected_s, (crowd.dearest - 1.0) * seconds[0]), seconds[0])
        off = min(max(_STEEP * crowd.off_tokens, rests.longest(expected_s, seconds[0]) // _STEEP), longest)
        pooled.crowd = Crowd(is_on=False, off_tokens=max(rests.first_off, off), rested=1)
        return plans
    else:
        rounds_on = crowd.rounds_on + 1
        off_tokens = 0 if rounds_on == SETTLED else crowd.off_tokens
        pooled.crowd = replace(crowd, is_on=True, rounds_on=rounds_on, off_tokens=off_tokens)
        if rounds_on % _BASELINE >= _BASELINE - costs.plain_run:
            return plans
    for row in drafting:
        stop, lookup_depth = stop_rule(outlooks[row], pooled.calibration), outlooks[row].shared_lookup_depth(depth)
        plan = DraftPlan(max_depth=depth, stop=stop, price=outlooks[row].price, lookup_depth=lookup_depth)
        plans[row] = unstopped(plan if lookup_depth is None else replace(plan, follows=True))
    return plans
