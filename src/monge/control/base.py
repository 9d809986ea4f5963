"""The controller interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

from monge.control.cost_model import CostModel
from monge.control.memory import Memory
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.prompt import PromptProfile
from monge.core.verdict import StepRecord

State = TypeVar("State")
Reads = Literal["accepted", "tokens", "confidence", "costs", "notes"]
"""What a plan may depend on: how many tokens finished rounds accepted, which tokens are committed, the draft network's
confidence before a draw, measured times, what other requests taught."""

PLAIN: Final = DraftPlan(max_depth=0)
"""No speculation in the coming round: nothing is drafted, so the drafter runs no forward."""


class Controller(ABC, Generic[State]):
    """Chooses a plan from past records alone, never from tokens still to be verified; state goes in and comes back.

    Attributes:
        reads: What its plans depend on. With `costs`, plans depend on measured times, so a sampled text keeps its law but a
            seed does not reproduce it.
        plans_splits: Whether its plans say how many candidates are top tokens, so that a tree must have such candidates.
        selects: Whether it chooses between the drafters of a pool.
    """

    reads: frozenset[Reads] = frozenset()
    plans_splits: ClassVar[bool] = False
    selects: ClassVar[bool] = False

    @abstractmethod
    def init(self, memory: Memory) -> State:
        """State of a new request, given what the decoder's requests share.

        Raises:
            OptionError: If it reads costs and there are none.
        """

    def rests(self, memory: Memory, num_requests: int) -> bool:
        """Whether requests that begin now are decoded plainly at first, so that no drafter need read their prompts.

        It is about time only: a drafter reads what it has missed when it is asked for a draft.

        Args:
            memory: What the decoder's requests share.
            num_requests: Requests that will share rounds, those that begin and those that they join.
        """
        return False

    @abstractmethod
    def plan(self, state: State, draws: Draws) -> DraftPlan:
        """Limits of the coming round."""

    def plan_many(self, states: Sequence[State], draws: Sequence[Draws]) -> Sequence[DraftPlan]:
        """Plans of all requests that share the coming round: those of `plan`, one by one, unless they share a budget.

        Request i draws from `draws[i]` only. A plan may depend on the neighbours' finished rounds, never on what anybody draws
        in this one.
        """
        return [self.plan(state, own) for state, own in zip(states, draws, strict=True)]

    def stands(self, states: Sequence[State], plans: Sequence[DraftPlan], num_tokens: Sequence[int]) -> int:
        """For how many rounds plans hold, the coming one counted; asked where it has planned for all that share it.

        The loop then asks for no others, and tells of these rounds together: in rounds of a millisecond, asking and telling
        take a percent. They may be fewer: a request may end or leave, others may join, and a round may bring news (`is_news`).
        Of those of a request that leaves nobody is told.

        A controller that reads neither costs nor notes is to let plans stand only where it would plan the same again: they end
        where others join, so that a neighbour would else change the text of a seed.

        Args:
            states: Of the requests.
            plans: What was planned for their coming round.
            num_tokens: Tokens of their texts.
        """
        return 1

    def is_news(self, state: State, record: StepRecord) -> bool:
        """Whether a round is to be told of at once although its plan stands: the coming ones may be planned otherwise for it.

        Asked only where a drafter of a pool without a network proposed something, or where the round decided about what one
        would have proposed.

        Args:
            state: Of the request, which knows of the rounds before those for which the plan stands.
            record: The round.
        """
        return True

    @abstractmethod
    def update(self, state: State, record: StepRecord) -> State:
        """State after a round."""

    def update_many(self, state: State, records: Sequence[StepRecord]) -> State:
        """State after the rounds for which a plan stood, in order."""
        for record in records:
            state = self.update(state, record)
        return state


class PromptReader(Controller[State]):
    """A controller that looks at the prompt before the first round."""

    @property
    def reads_prompt_laws(self) -> bool:
        """Whether it wants to know how surprising the target finds the prompt."""
        return False

    @abstractmethod
    def read(self, state: State, prompt: PromptProfile) -> State:
        """The state of a new request, given its prompt."""


AnyController = Controller[Any]


def costs_of(memory: Memory, name: str) -> CostModel:
    """The cost table that a controller needs.

    Raises:
        OptionError: If there is none.
    """
    if memory.costs is None:
        raise OptionError(f"controller {name!r} needs costs; give a CostModel to make_parts(costs=...), or measure one")
    return memory.costs


def check_windows(name: str, *, lowest: int, highest: int, first: int | None = None) -> None:
    """Refuse windows that no round can have.

    Raises:
        OptionError: If they are negative or out of order.
    """
    start = highest if first is None else first
    if not 0 <= lowest <= start <= highest or highest < 1:
        between = "" if first is None else f" <= the first window ({first})"
        raise OptionError(
            f"{name}: need 0 <= the smallest window ({lowest}){between} <= the largest ({highest}), which is >= 1"
        )


def check_share(name: str, **shares: float | int) -> None:
    """Refuse what is no number in [0, 1].

    Raises:
        OptionError: If one is NaN or outside.
    """
    for key, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise OptionError(f"{name}: {key} must lie in [0, 1]; got {share}")
