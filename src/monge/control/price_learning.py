"""What `price` learns of a request from its rounds."""

from dataclasses import replace

from monge.control.price_memory import pooled_of
from monge.control.price_outlook import measured_rounds, predicted_seconds
from monge.control.price_request import Request

_REQUEST_KEEP = 0.9  # weight that a round keeps with every later one, in a request's acceptance
_SHORT_KEEP = 0.85  # and in the speed that decides whether speculation goes on


def learnt(state: Request, *, begins: bool = False) -> Request:
    """The state after learning from the rounds that waited for it; what was expected before is no longer.

    Args:
        state: The request.
        begins: Whether a spell begins with the first of them, see `Spells`.
    """
    if not state.waiting:
        return state
    pooled, counts, tokens, seconds = pooled_of(state.memory), state.counts, state.tokens, state.seconds
    for record in state.waiting:
        its_seconds = predicted_seconds(state.memory, record)
        pooled.learn(record, its_seconds, begins=begins)
        if record.batch_size > 1:
            pooled.crowd = pooled.crowd.met(record.num_accepted + 1, *measured_rounds(state.memory, record))
        counts, begins = counts.update(record, _REQUEST_KEEP), False
        tokens = _SHORT_KEEP * tokens + record.num_accepted + 1
        seconds = _SHORT_KEEP * seconds + its_seconds
    return replace(state, counts=counts, tokens=tokens, seconds=seconds, outlook=None, stop=None, looked_s=0.0, waiting=())
