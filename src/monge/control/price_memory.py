"""What the requests of a decoder that plans by `price` teach each other."""

from dataclasses import dataclass, replace

from monge.control.calibration import Calibration
from monge.control.memory import Memory
from monge.control.price_batch import Crowd
from monge.control.survival import DepthCounts
from monge.core.verdict import StepRecord

_POOLED_KEEP = 0.99  # weight that a round keeps with every later one, in all requests' acceptance
_RATE_KEEP = 0.98  # the same in the running speed, whose inverse is the price of a token


@dataclass(frozen=True, slots=True)
class Pooled:
    """What requests taught: acceptance by depth, calibration, tokens and seconds of late, and how long the last one rested.

    `rested` counts the tokens that they decoded plainly since one last drafted, a token for a round that they shared; `crowd`
    is about those that share rounds.
    """

    counts: DepthCounts = DepthCounts()
    calibration: Calibration = Calibration()
    tokens: float = 0.0
    seconds: float = 0.0
    off_tokens: int = 0
    rested: int = 0
    crowd: Crowd = Crowd()


_NOTHING = Pooled()


def pooled_of(memory: Memory) -> Pooled:
    """What is known by now."""
    return memory.notes.get("price", _NOTHING)


def note_off(memory: Memory, off_tokens: int) -> None:
    """A request has switched drafting off for so many tokens, or found that it pays (0)."""
    memory.notes["price"] = replace(pooled_of(memory), off_tokens=off_tokens, rested=0)


def note_crowd(memory: Memory, crowd: Crowd) -> None:
    """How the requests that share rounds go on."""
    memory.notes["price"] = replace(pooled_of(memory), crowd=crowd)


def note_shared_rest(memory: Memory) -> None:
    """Requests that rest share a round."""
    pooled = pooled_of(memory)
    crowd = replace(pooled.crowd, rested=pooled.crowd.rested + 1)
    memory.notes["price"] = replace(pooled, crowd=crowd, rested=pooled.rested + 1)


def note_rest(memory: Memory, num_tokens: int) -> None:
    """A request alone decoded so many tokens plainly."""
    pooled = pooled_of(memory)
    rested = pooled.rested + num_tokens
    # Spelled out, since it happens in every round of a request that rests, and `replace` is slow.
    memory.notes["price"] = Pooled(
        pooled.counts, pooled.calibration, pooled.tokens, pooled.seconds, pooled.off_tokens, rested, pooled.crowd
    )


def teach(memory: Memory, record: StepRecord, tokens: int, seconds: float) -> None:
    """A round that drafted: its tokens and predicted seconds."""
    pooled = pooled_of(memory)
    memory.notes["price"] = Pooled(
        counts=pooled.counts.update(record, _POOLED_KEEP),
        calibration=pooled.calibration.update(record.confidences, record.num_accepted, len(record.examined)),
        tokens=_RATE_KEEP * pooled.tokens + tokens,
        seconds=_RATE_KEEP * pooled.seconds + seconds,
        off_tokens=pooled.off_tokens,
        crowd=pooled.crowd,
    )
