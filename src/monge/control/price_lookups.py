"""What `price` expects of those drafters of a pool that run no network: they draft first where that is worth more."""

from monge.control.base import costs_of
from monge.control.price_memory import POOLED_KEEP, REQUEST_KEEP, Pooled, pooled_of
from monge.control.price_outlook import Lookups
from monge.control.price_request import Request
from monge.control.survival import DepthCounts, expected_tokens
from monge.core.verdict import StepRecord


def lookups_of(state: Request, max_window: int, context: int) -> Lookups | None:
    """Expected tokens and seconds of rounds with looked-up candidates; `None` where there is nothing to choose.

    Acceptance is that of this request and, while it has few such drafts, of all: a text that begins to repeat itself is known
    by its own last drafts.

    Args:
        state: The request.
        max_window: Largest window.
        context: Tokens of its text.
    """
    names = state.memory.lookups
    deepest = min(max_window, max((member.max_depth for member in state.memory.members if member.name in names), default=0))
    if not deepest:
        return None
    costs = costs_of(state.memory, "price")
    usual = pooled_of(state.memory).looked.acceptance(deepest)
    tokens = expected_tokens(state.looked.acceptance(deepest, usual))
    seconds = [costs.verify_s(nodes, costs.batch_size, context) for nodes in range(deepest + 1)]
    return Lookups(tokens, seconds)


def noted(pooled: Pooled, looked: DepthCounts, record: StepRecord, *, looked_up: bool) -> DepthCounts:
    """A request's acceptance of looked-up candidates after a round, which teaches other requests too.

    It counts the round's own candidates, and those of earlier places that the text has decided about since: of several drafters
    that would have drafted there, the first would have.
    """
    drafts = [(len(record.examined), record.num_accepted)] if looked_up and record.depth else []
    position = -1
    for entry in record.hindsight:
        if entry.num_nodes and entry.position != position:
            position = entry.position
            drafts.append((len(entry.factors), int(sum(entry.factors))))
    for examined, taken in drafts:
        looked = looked.seen(examined, taken, REQUEST_KEEP)
        pooled.looked = pooled.looked.seen(examined, taken, POOLED_KEEP)
    return looked
