"""What `price` knows of one request."""

from dataclasses import dataclass

from monge.control.memory import Memory
from monge.control.price_outlook import Outlook
from monge.control.survival import DepthCounts
from monge.core.stopping import StopRule
from monge.core.verdict import StepRecord


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
        off_left: Tokens to be decoded plainly before speculation is tried again, from `context_length` on.
        off_tokens: How many there were when it was last switched off; 0 while it is settled.
        trial_left: Rounds of the present trial that are left.
        rounds_on: Rounds since it was switched on.
        outlook: What the coming rounds are expected to bring, if it is known already.
        stop: When they stop drafting, likewise.
        looked_s: Seconds of rounds since then.
        waiting: These rounds, from which nothing has been learnt yet.
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
    waiting: tuple[StepRecord, ...] = ()
    was_shared: bool = False

    def is_lasting(self, record: StepRecord, stride: int) -> bool:
        """Whether a plain round that others shared changes nothing but the length of a text that grows as theirs do."""
        is_idle = self.was_shared and not self.off_left and not self.waiting and self.context_length is not None
        return is_idle and self.grown(record) < stride

    def rests_on(self, record: StepRecord, stride: int) -> bool:
        """Whether a plain round of a request alone changes nothing but how much of its rest is left, which its text tells."""
        if self.was_shared or self.waiting or self.context_length is None:
            return False
        return 0 < self.grown(record) < min(stride, self.off_left)

    def grown(self, record: StepRecord) -> int:
        """Tokens by which the text is longer after a round than the state knows; 0 where it knows no length."""
        return 0 if self.context_length is None else record.context_length + len(record.token_ids) - self.context_length

    def with_waiting(self, record: StepRecord, looked_s: float) -> "Request":
        """After a round from which is learnt later; spelled out, since most short rounds wait, and `replace` is slow."""
        return Request(
            self.memory,
            self.kin,
            self.counts,
            self.tokens,
            self.seconds,
            record.context_length + len(record.token_ids),
            self.off_left,
            self.off_tokens,
            self.trial_left,
            self.rounds_on + 1,
            self.outlook,
            self.stop,
            looked_s,
            (*self.waiting, record),
            self.was_shared,
        )
