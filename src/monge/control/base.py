"""The controller interface: `init`, `plan`, `update`, and `learn` for a memory of all requests."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.parts import Part
from monge.core.prompt import PromptProfile
from monge.core.selection import Member
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws

State = TypeVar("State")


class Reads(StrEnum):
    """Information that a plan may depend on.

    Attributes:
        ACCEPTED: Accepted tokens of finished rounds.
        TOKENS: Committed tokens.
        LATENCY: Measured times.
        MEMORY: What other requests taught; see `Controller.learn`.
    """

    ACCEPTED = "accepted"
    TOKENS = "tokens"
    LATENCY = "latency"
    MEMORY = "memory"


@dataclass(slots=True)
class SharedState:
    """State that the requests of a controller share. Only the engine changes it, after every round.

    A controller that reads neither `latency` nor `memory` plans for a request as if it were alone,
    so that equal seeds give equal texts whatever the neighbours. A controller that reads them keeps
    the *distribution* of every request's text, but not the text of a seed.

    Args:
        latency: Measured times; `None` where no controller reads them.
        memory: What the controller has learnt; see `Controller.learn`.
        members: The drafters of the decoder's pool, in its order; empty where there is no pool.
        max_depth: Depth of the deepest draft; `None` for unbounded.
        others: Shared states of the decoder's further controllers, by name.
    """

    latency: Latency | None = None
    memory: Any = None
    members: tuple[Member, ...] = ()
    max_depth: int | None = None
    others: dict[str, "SharedState"] = field(default_factory=dict[str, "SharedState"])

    def fresh(self) -> "SharedState":
        """Return the state before the first request."""
        latency = None if self.latency is None else Latency()
        return SharedState(latency, members=self.members, max_depth=self.max_depth)

    def beside(self, name: str) -> "SharedState":
        """Return the shared state of a further controller: the same, with its own memory."""
        other = self.others.setdefault(name, SharedState())
        other.latency, other.members, other.max_depth = self.latency, self.members, self.max_depth
        return other


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInfo:
    """Facts about the coming round, for the requests that a controller plans together.

    Args:
        context_lengths: Tokens of each request's text.
        batch_size: Requests that share the round, including those of other controllers.
        num_waiting: Requests that wait for a place in the batch.
        memory: What the controller has learnt; see `Controller.learn`.
    """

    context_lengths: tuple[int, ...]
    batch_size: int = 1
    num_waiting: int = 0
    memory: Any = None


class Controller(Part, ABC, Generic[State]):
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

    def prefills_drafter_eagerly(self, shared: SharedState) -> bool:
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

    def learn(self, memory: Any, state: State, record: StepRecord) -> Any:  # noqa: ANN401
        """Return what later rounds of all requests need to know, after a round of a request.

        The engine hands the memory to the controller's next requests, in `SharedState.memory`, and
        to its next rounds, in `RoundInfo.memory`. By default nothing is learnt.

        Args:
            memory: The memory before the round, `None` at first. It must not be changed in place.
            state: State of the request after the round.
            record: The round.
        """
        return memory


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
        """Return the plan of a request whose text has `context_length` tokens."""


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


def draw_index(weights: Sequence[float], draws: Draws) -> int:
    """Draw the place of a weight, each in proportion to its weight, by coins."""
    places = [place for place, weight in enumerate(weights) if weight > 0.0]
    left = math.fsum(weights)
    for place in places[:-1]:
        if draws.bernoulli(min(1.0, weights[place] / left)):
            return place
        left -= weights[place]
    return places[-1]
