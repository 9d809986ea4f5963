"""What `price` knows of one request."""

from dataclasses import dataclass

from monge.control.memory import Memory
from monge.control.price_outlook import Outlook
from monge.control.survival import DepthCounts
from monge.core.stopping import StopRule


@dataclass(frozen=True, slots=True)
class Request:
    """State of one request.

    Args:
        memory: What the decoder's requests share.
        kin: Rounds beyond the usual ones that requests before it count for in its acceptance.
        counts: Acceptance by depth in this request.
        tokens: Tokens of the last rounds, the latest counting most.
        seconds: Their predicted seconds.
        context_length: Tokens of the text so far, once a round has said so.
        off_left: Tokens to be decoded plainly before speculation is tried again.
        off_tokens: How many there were when it was last switched off; 0 while it is settled.
        trial_left: Rounds of the present trial that are left.
        rounds_on: Rounds since it was switched on.
        outlook: What the coming rounds are expected to bring, if it is known already.
        stop: When they stop drafting, likewise.
        looked_s: Seconds of rounds since then.
        was_shared: Whether the last round was a batch's, so that the batch decided.
    """

    memory: Memory
    kin: float = 0.0
    counts: DepthCounts = DepthCounts()
    tokens: float = 0.0
    seconds: float = 0.0
    context_length: int | None = None
    off_left: int = 0
    off_tokens: int = 0
    trial_left: int = 0
    rounds_on: int = 0
    outlook: Outlook | None = None
    stop: StopRule | None = None
    looked_s: float = 0.0
    was_shared: bool = False
