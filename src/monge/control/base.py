"""The controller interface: `init`, `plan`, `update`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Any, ClassVar, Final, Generic, TypeVar

from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.prompt import PromptProfile
from monge.core.selection import Member
from monge.core.verdict import StepRecord

State = TypeVar("State")


class Reads(StrEnum):
    """Information that a plan may depend on.

    Attributes:
        ACCEPTED: Accepted tokens of finished rounds.
        TOKENS: Committed tokens.
        CONFIDENCE: The draft network's confidence before a draw.
        LATENCY: Measured times.
        NOTES: What other requests taught.
    """

    ACCEPTED = "accepted"
    TOKENS = "tokens"
    CONFIDENCE = "confidence"
    LATENCY = "latency"
    NOTES = "notes"


PLAIN: Final = DraftPlan(max_depth=0)
"""Plain decoding in the coming round."""


@dataclass(slots=True)
class SharedState:
    """State of a decoder that outlives its requests.

    The engine corrects `latency` after every round. `notes` belong to the controllers, one entry
    each. A controller that reads neither plans for a request as if it were alone, so that equal
    seeds give equal texts whatever the neighbours. One that reads them keeps the *distribution* of
    every request's text, but not the text of a seed.

    Args:
        latency: Measured times; `None` where no controller reads them.
        notes: State of controllers that outlives a request, by name.
        members: The drafters of the decoder's pool, in its order; empty where there is no pool.
        max_depth: Depth of the deepest draft; `None` for unbounded.
    """

    latency: Latency | None = None
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    members: tuple[Member, ...] = ()
    max_depth: int | None = None

    def beside(self, name: str) -> "SharedState":
        """Return the shared state of a further controller: the same, with its own notes by name."""
        notes = self.notes.setdefault(f"controller {name}", {})
        return SharedState(self.latency, notes, self.members, self.max_depth)

    @property
    def model_free(self) -> frozenset[str | None]:
        """Names of the pool's drafters that run no network and come before one that does."""
        first = list(takewhile(lambda member: not member.runs_network, self.members))
        return frozenset(member.name for member in first if len(first) < len(self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInfo:
    """Facts about the coming round, for the requests that one controller plans together.

    Args:
        context_lengths: Tokens of each request's text.
        batch_size: Requests that share the round, including those of other controllers.
        num_waiting: Requests that wait for a place in the batch.
    """

    context_lengths: tuple[int, ...]
    batch_size: int = 1
    num_waiting: int = 0


class Controller(ABC, Generic[State]):
    """Chooses the limits of each round from finished rounds alone, never from tokens that are still to be verified.

    Attributes:
        reads: Information that its plans depend on. With `latency`, plans depend on measured times:
            a sampled text keeps its distribution, but a seed does not reproduce it.
        selects: Whether it chooses between the drafters of a pool.
    """

    reads: frozenset[Reads] = frozenset()
    selects: ClassVar[bool] = False

    @abstractmethod
    def init(self, shared: SharedState) -> State:
        """Return the state of a new request.

        Raises:
            OptionError: If the controller reads latency and there is none.
        """

    def drafts_at_once(self, shared: SharedState) -> bool:
        """Return whether a new request is expected to draft in its first rounds.

        If not, the draft network reads the prompt only when its first draft is due. This concerns
        time, not output.
        """
        return True

    @abstractmethod
    def plan(
        self, states: Sequence[State], info: RoundInfo, draws: Sequence[Draws]
    ) -> Sequence[DraftPlan]:
        """Return the plans of the requests that share the coming round.

        A plan may depend on finished rounds of other requests, but never on draws of this round.

        Args:
            states: State of each request.
            info: Facts about the round.
            draws: Randomness of each request; request i draws from `draws[i]` only.
        """

    @abstractmethod
    def update(self, state: State, record: StepRecord) -> State:
        """Return the state after a round."""


class SoloController(Controller[State]):
    """A controller that plans for each request as if it were alone."""

    def plan(
        self, states: Sequence[State], info: RoundInfo, draws: Sequence[Draws]
    ) -> list[DraftPlan]:
        rows = zip(states, info.context_lengths, draws, strict=True)
        return [self.plan_one(state, info, length, row_draws) for state, length, row_draws in rows]

    @abstractmethod
    def plan_one(
        self, state: State, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        """Return the plan of one request whose text has `context_length` tokens."""


class PromptReader(Controller[State]):
    """A controller that reads the prompt before the first round."""

    @property
    def reads_prompt_laws(self) -> bool:
        """True if it needs the target's distributions along the prompt."""
        return False

    @abstractmethod
    def read(self, state: State, prompt: PromptProfile) -> State:
        """Return the state of a new request, given its prompt."""


AnyController = Controller[Any]


def latency_of(shared: SharedState, name: str) -> Latency:
    """Return the latency that a controller needs.

    Raises:
        OptionError: If there is none.
    """
    if shared.latency is None:
        raise OptionError(f"controller {name!r} needs latency; give a Latency, or measure one")
    return shared.latency
