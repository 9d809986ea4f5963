"""The controller interface."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import StepRecord

State = TypeVar("State")


class Controller(ABC, Generic[State]):
    """Chooses a plan from past records alone, never from tokens that are still to be verified; state goes in and comes back."""

    @abstractmethod
    def init(self) -> State:
        """State of a new request."""

    @abstractmethod
    def plan(self, state: State, draws: Draws) -> DraftPlan:
        """Limits of the coming round."""

    @abstractmethod
    def update(self, state: State, record: StepRecord) -> State:
        """State after a round."""


AnyController = Controller[Any]
