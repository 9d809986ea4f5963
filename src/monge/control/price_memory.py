"""What the requests of a decoder that plans by `price` teach each other."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monge.control.calibration import Calibration
from monge.control.memory import Memory
from monge.control.price_batch import Crowd
from monge.control.price_follows import Follows
from monge.control.price_stretch import Stretch
from monge.control.spread import Spread
from monge.control.survival import POOLED_KEEP, DepthCounts
from monge.core.verdict import StepRecord

_RATE_KEEP = 0.98  # the same in the running speed, whose inverse is the price of a token
_SPELL_KEEP = 0.9  # weight that a request keeps with every later one, in how long they are
_CLEAR = 1.3  # times the speed of plain decoding: where drafting brings less, each request is to be looked at often
_USUAL_LENGTH = 128.0  # tokens that one request is taken to have had before the first: that may be a trial call of a few tokens


@dataclass(slots=True)
class Spells:
    """What requests decode alone: from their beginning, or from when others left them, to their end or until others join.

    Args:
        count: How many, the latest counting most; the present one is counted.
        tokens: Tokens decoded in them.
        texts: Tokens of the texts that they began with.
        guessed: What is left of the weight of one request that is only guessed.
    """

    count: float = 0.0
    tokens: float = 0.0
    texts: float = 0.0
    guessed: float = 1.0

    def add(self, num_tokens: int, *, begins_at: int | None = None) -> None:
        """Note tokens of a request alone, with which a spell may begin, behind a text of so many."""
        if begins_at is not None:
            self.count = _SPELL_KEEP * self.count + 1.0
            self.tokens *= _SPELL_KEEP
            self.texts = _SPELL_KEEP * self.texts + begins_at
            self.guessed *= 0.5
        self.tokens += num_tokens

    @property
    def length(self) -> float:
        """Tokens of one."""
        return (self.tokens + _USUAL_LENGTH * self.guessed) / (self.count + self.guessed)

    @property
    def text(self) -> float:
        """Tokens of the text that one begins with."""
        return self.texts / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Calm:
    """Whether the last look at what rounds bring said what the one before it did, and clearly that drafting pays.

    Args:
        said: Window of rounds that run as one, if these are worth most, and of others.
        is_calm: Whether it did.
    """

    said: tuple[int | None, int] | None = None
    is_calm: bool = False

    def after(self, whole: int | None, window: int, gain: float) -> "Calm":
        """After another look, which expects so many times the speed of plain decoding."""
        said = whole, window
        return Calm(said, is_calm=said == self.said and gain > _CLEAR)


@dataclass(slots=True)
class Pooled:
    """What requests taught, and how the last ones rested: one object for all of a decoder, changed in place.

    Args:
        counts: Acceptance by depth.
        calibration: Of the draft network's confidence.
        tokens: Tokens of rounds that drafted, the latest counting most.
        seconds: Predicted seconds of these rounds.
        off_tokens: Tokens that the last request which switched drafting off rests for; 0 where it pays.
        rested: Tokens decoded plainly since one last drafted; a round that requests share counts as one.
        crowd: How those that share rounds stand with drafting.
        spells: What those that do not share rounds decode.
        stretches: Those that began and from which nobody has learnt yet.
        opening: How requests begin by the last look at it, and with how many rounds another is due.
        num_taught: Rounds that taught something.
        debt_s: That of the request which drafted last: short ones must not each lose what one may.
        begun: The state that the next request begins with, known since somebody asked whether its prompt is read.
        looked: Acceptance by depth of candidates that drafters without a network proposed beside others, or would have.
        spread: How far requests differ in `counts`.
        calm: Whether looks say the same.
        follows: How often rounds of a request that rests alone ask lookups, or follow what these would have found.
    """

    counts: DepthCounts = DepthCounts()
    calibration: Calibration = Calibration()
    tokens: float = 0.0
    seconds: float = 0.0
    off_tokens: int = 0
    rested: int = 0
    crowd: Crowd = Crowd()
    spells: Spells = field(default_factory=Spells)
    stretches: list[Stretch] = field(default_factory=list[Stretch])
    opening: tuple[Any, int] | None = None
    num_taught: int = 0
    debt_s: float = 0.0
    begun: tuple[object, Any] | None = None
    looked: DepthCounts = DepthCounts()
    spread: Spread = Spread()
    calm: Calm = Calm()
    follows: Follows = field(default_factory=Follows)

    @property
    def seen(self) -> float:
        """Rounds of which the acceptance of all is known, the latest counting most."""
        return self.counts.reached[0] if self.counts.reached else 0.0

    def begin(self, state: Any) -> None:  # noqa: ANN401 (requests know this class)
        """Keep the state of a request that is about to begin."""
        self.begun = self._moment, state

    def taken(self) -> Any | None:  # noqa: ANN401
        """The state that was kept, if nothing has been learnt since; it is given once."""
        begun, self.begun = self.begun, None
        return begun[1] if begun is not None and begun[0] == self._moment else None

    @property
    def num_rounds(self) -> int:
        """Rounds that taught something, or will."""
        return self.num_taught + sum(len(stretch.records) - stretch.num_taught for stretch in self.stretches)

    @property
    def opened(self) -> Any | None:  # noqa: ANN401
        """How the next request begins, if it is not time to look at it again."""
        return self.opening[0] if self.opening is not None and self.num_rounds < self.opening[1] else None

    @property
    def _moment(self) -> object:
        return self.off_tokens, self.rested, self.tokens, self.spells.tokens, self.debt_s, len(self.stretches)

    @property
    def speed(self) -> float:
        """Tokens per predicted second of rounds that drafted; 0 before the first."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    def note_stretch(self, stretch: Stretch) -> None:
        """Note a stretch that begins; of those that began and got no round nothing is left to learn."""
        self.stretches = [*(one for one in self.stretches if one.records), stretch]

    def switch_off(self, off_tokens: int) -> None:
        """Note that a request has switched drafting off for so many tokens, or found that it pays (0)."""
        self.off_tokens, self.rested, self.opening, self.calm = off_tokens, 0, None, Calm()
        self.follows.begin()

    def rest_together(self, num_rounds: int = 1) -> None:
        """Note that requests that rest share rounds."""
        self.crowd = replace(self.crowd, rested=self.crowd.rested + num_rounds)
        self.rested += num_rounds

    def rest_on(self, most: int) -> int:
        """For how many rounds, the coming one counted and noted before, requests that rest need no other plan; noted here."""
        further = min(most - 1, self.crowd.off_tokens - self.crowd.rested) if self.crowd.is_resting else 0
        if further:
            self.rest_together(further)
        return 1 + further

    def rest(self, records: Sequence[StepRecord], *, begins: bool = False) -> None:
        """Note plain rounds of a request alone, with the first of which a spell may begin."""
        num_tokens = sum(len(one.token_ids) for one in records)
        self.rested += num_tokens
        if begins:
            self.follows.begin()
        self.follows.note(records, num_tokens)
        self.spells.add(num_tokens, begins_at=records[0].context_length if begins else None)

    def learn(
        self, records: Sequence[StepRecord], seconds: Sequence[float], *, begins: bool, lookups: Container[str | None]
    ) -> None:
        """Learn from rounds of a request that drafted.

        Args:
            records: The rounds.
            seconds: What each is predicted to take.
            begins: Whether a spell begins with the first.
            lookups: Drafters without a network, beside others that have one.
        """
        self.num_taught += len(records)
        networks = [record for record in records if record.drafter not in lookups]
        drafts = [(len(one.examined), one.num_accepted) for one in networks]
        if self.counts.reached:
            self.spread = self.spread.seen(drafts, self.counts.accepted[0] / self.counts.reached[0])
        self.counts = self.counts.seen(drafts, POOLED_KEEP)
        for record in networks:
            self.calibration = self.calibration.update(record.confidences, record.num_accepted, len(record.examined))
        tokens, spent_s, num_alone = self.tokens, self.seconds, 0
        for record, its_seconds in zip(records, seconds, strict=True):
            tokens = _RATE_KEEP * tokens + record.num_accepted + 1
            spent_s = _RATE_KEEP * spent_s + its_seconds
            num_alone += len(record.token_ids) if record.batch_size == 1 else 0
        self.tokens, self.seconds = tokens, spent_s
        if records:
            self.rested, first = 0, records[0]
            self.spells.add(num_alone, begins_at=first.context_length if begins and first.batch_size == 1 else None)


def pooled_of(memory: Memory) -> Pooled:
    """What is known by now."""
    known: Pooled | None = memory.notes.get("price")
    if known is None:
        known = memory.notes["price"] = Pooled()
    return known
