"""What `price` expects of those drafters of a pool that run no network: they draft first where that is worth more."""

from collections.abc import Container, Sequence

from monge.control.base import costs_of
from monge.control.price_looked_up import drafts_of
from monge.control.price_memory import Pooled, pooled_of
from monge.control.price_outlook import Lookups
from monge.control.price_request import Request
from monge.control.survival import POOLED_KEEP, REQUEST_KEEP, DepthCounts
from monge.core.verdict import StepRecord


def lookups_of(state: Request, max_window: int, context: int, verifying: Sequence[float]) -> Lookups | None:
    """Expected tokens and seconds of rounds with looked-up candidates; `None` where there is nothing to choose.

    Acceptance is that of this request and, while it has few such drafts, of all: a text that begins to repeat itself is known
    by its own last drafts.

    Args:
        state: The request.
        max_window: Largest window.
        context: Tokens of its text.
        verifying: Seconds without drafting of rounds whose plans have the depths 0 to the largest.
    """
    names = state.memory.lookups
    deepest = min(max_window, max((member.max_depth for member in state.memory.members if member.name in names), default=0))
    if not deepest:
        return None
    costs, usual = costs_of(state.memory, "price"), pooled_of(state.memory).looked.acceptance(deepest)
    if costs.nodes != tuple(range(len(costs.nodes))):  # the network's drafts are trees, and these are not
        _, verifying = costs.without_drafting().levels_s(deepest, costs.batch_size, context)
    keep_from_one = costs.whole is not None and deepest >= costs.whole.longest_text
    return Lookups.of(state.looked, usual, verifying[: deepest + 1], keep_from_one=keep_from_one)


def noted(
    pooled: Pooled,
    looked: DepthCounts,
    records: Sequence[StepRecord],
    lookups: Container[str | None],
    num_taught: int = 0,
) -> DepthCounts:
    """A request's acceptance of looked-up candidates after some rounds; those after the first `num_taught` teach others too."""
    before, since = (
        [draft for record in some for draft in drafts_of(record, lookups)]
        for some in (records[:num_taught], records[num_taught:])
    )
    pooled.looked = pooled.looked.seen(since, POOLED_KEEP)
    return looked.seen(before + since, REQUEST_KEEP)
