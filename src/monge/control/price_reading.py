"""Whether a request alone is long enough for a draft model to read its prompt."""

from monge.control.base import Memory, costs_of
from monge.control.price_memory import pooled_of
from monge.control.price_outlook import Outlook


def reading_s(memory: Memory) -> float:
    """Seconds in which the drafter reads the text of a usual request; 0 while it is not known."""
    return costs_of(memory, "price").read_s * pooled_of(memory).spells.text


def coming_back_s(memory: Memory) -> float:
    """Seconds in which the drafter reads what a rest made it miss, when a request drafts again; 0 while it is not known."""
    return max(costs_of(memory, "price").catch_up_s, reading_s(memory))


def beginning_s(memory: Memory) -> float:
    """The same of the request that is about to begin, whose text may be longer or shorter than usual."""
    costs = costs_of(memory, "price")
    return costs.read_s * costs.context_length


def repays_reading(memory: Memory, outlook: Outlook, needed_s: float) -> bool:
    """Whether drafting is expected to save a request of the usual length the time that reading its text takes.

    Args:
        memory: What the decoder's requests share.
        outlook: What a round is expected to bring.
        needed_s: That time; what is not known costs nothing.
    """
    pooled = pooled_of(memory)
    if needed_s == 0.0:
        return True
    saved_s = pooled.spells.length * (1.0 / outlook.plain_speed - 1.0 / max(outlook.speed, pooled.speed))
    return saved_s >= needed_s
