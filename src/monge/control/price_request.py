"""What `price` knows of one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.control.memory import Memory
from monge.control.price_outlook import Outlook
from monge.control.price_stretch import Stretch
from monge.control.survival import DepthCounts
from monge.core.verdict import StepRecord


@dataclass(frozen=True, slots=True)
class Request:
    """State of one request.

    Args:
        memory: What the decoder's requests share.
        kin: Rounds beyond the usual ones that requests before it count for in its acceptance.
        counts: Acceptance by depth in this request.
        debt_s: Predicted seconds by which rounds that drafted are behind plain decoding of their tokens, since they were last
            ahead of it.
        context_length: Tokens of the text so far, once a round has said so.
        off_left: Tokens to be decoded plainly before speculation is tried again, from `context_length` on.
        off_tokens: How many there were when it was last switched off; 0 while it is settled.
        trial_left: Rounds of the present trial that are left.
        rounds_on: Rounds since it was switched on.
        outlook: What the coming rounds are expected to bring, if it is known already.
        stretch: The rounds since then, if they are alike and nothing has been learnt from them yet.
        was_shared: Whether the last round was a batch's, so that the batch decided.
        looked: Acceptance by depth of candidates that drafters without a network proposed, or would have proposed.
        resting_depth: How deep these draft while the others rest; `None` where there are none, or no others.
    """

    memory: Memory
    kin: float = 0.0
    counts: DepthCounts = DepthCounts()
    debt_s: float = 0.0
    context_length: int | None = None
    off_left: int = 0
    off_tokens: int = 0
    trial_left: int = 0
    rounds_on: int = 0
    outlook: Outlook | None = None
    stretch: Stretch | None = None
    was_shared: bool = False
    looked: DepthCounts = DepthCounts()
    resting_depth: int | None = None

    @property
    def is_new(self) -> bool:
        """Whether no round of it is known yet."""
        return self.context_length is None and (self.stretch is None or not self.stretch.records)

    def left(self, num_tokens: int) -> int:
        """Tokens that are left of a rest of a request alone whose text has so many; 1 where that is not known."""
        if not self.off_left or self.context_length is None or self.was_shared:
            return 1
        return self.off_left + self.context_length - num_tokens

    def is_lasting(self, record: StepRecord, stride: int) -> bool:
        """Whether a plain round that others shared changes nothing but the length of a text that grows as theirs do."""
        is_idle = self.was_shared and not self.off_left and self.stretch is None and self.context_length is not None
        return is_idle and self.grown(record) < stride

    def num_resting(self, records: Sequence[StepRecord]) -> int:
        """How many of these rounds, in order, are those of a rest of a request alone that had begun before."""
        if self.was_shared or self.stretch is not None or self.context_length is None or not self.off_left:
            return 0
        shared_or_not = (place for place, one in enumerate(records) if one.plan.max_depth != 0 or one.batch_size > 1)
        return next(shared_or_not, len(records))

    def grown(self, record: StepRecord) -> int:
        """Tokens by which the text is longer after a round than the state knows; 0 where it knows no length."""
        return 0 if self.context_length is None else record.context_length + len(record.token_ids) - self.context_length
