"""The drafter interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.proposal import Proposal
from monge.core.selection import CounterfactualDraft, Member
from monge.core.stopping import Evidence
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Draft(Generic[State]):
    """One request's tree, and what goes with it.

    Args:
        tree: The tree.
        state: The drafter's state after drawing it.
        evidence: What the plan asked the drafter to note.
        drafter: Which drafter of a pool drew it.
        error: What kept the drafter from drawing all of it. The tree then holds what was drawn, as it was drawn: it is offered
            all the same, and the request goes on without the drafter.
    """

    tree: TokenTree
    state: State
    evidence: Evidence | None = None
    drafter: str | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a drafter declares, compared with the verifier before anything is decoded.

    Args:
        proposes: Kinds of proposals it may use.
        max_width: Most candidates of one node; `None` for unbounded.
        max_depth: Deepest node it may draft.
        needs_trees: Whether it may offer more than a chain, so that the target must read trees.
        max_length: Longest context that it can draft for, in tokens; `None` for unbounded.
        num_parameters: Numbers that it holds beside the networks, as a head does.
        num_bytes: Memory that they take.
        num_successors: How many of the target's most probable next tokens it wants to be told at every node of a finished
            round; see `Verdict.successors`.
        bytes_per_token: Memory that it takes for every token of a text, beside the networks' caches.
        reads_states: Whether it takes the target's hidden states, which one drafter at a time can.
        runs_network: Whether drafting costs forwards of a network. Model-free drafters, which do not, may be asked every round.
    """

    proposes: frozenset[type[Proposal]]
    max_width: int | None
    max_depth: int
    needs_trees: bool
    max_length: int | None = None
    num_parameters: int = 0
    num_bytes: int = 0
    num_successors: int = 0
    bytes_per_token: int = 0
    reads_states: bool = False
    runs_network: bool = True


class Drafter(ABC, Generic[State]):
    """Proposes a tree for every request of a batch; state goes in and comes back."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the drafter may propose."""

    @abstractmethod
    def open(self, contexts: Sequence[Context]) -> Sequence[State]:
        """States for new requests, made of their prompts."""

    @abstractmethod
    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[State],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[State]]:
        """One tree per request, within its plan; row i draws from `draws[i]` only.

        Requests whose plan is plain decoding (depth 0, no stop rule) may be left out: their draft is a lone root with the state
        that they had.

        What was drawn must be offered: to draw again, or not to offer a token once it is drawn, biases the text. A drafter that
        cannot go on after its first draw gives the tree so far with `Draft.error`. If it raises instead, its request ends in
        an error; if it raises before its first draw, the request is decoded without it.
        """

    @abstractmethod
    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[State]], verdicts: Sequence[Verdict]
    ) -> Sequence[State]:
        """States after the verdicts; `contexts` hold the committed tokens already.

        In a pool, a draft's tree may be another drafter's; its state is always this drafter's own.
        """

    @abstractmethod
    def close(self, context: Context) -> None:
        """Give back what the drafter keeps for a request."""


class PieceReader(Drafter[State]):
    """A drafter whose network reads prompts: it can be opened on the first part of one and read the rest in pieces.

    What it has not read when a draft is wanted, it reads then.
    """

    @property
    def reads_pieces(self) -> bool:
        """Whether it does so: a drafter made of others may not."""
        return True

    @abstractmethod
    def read(self, contexts: Sequence[Context]) -> None:
        """Read what was added to the prompts of open requests, all but the last token of each context."""


class DrafterPool(Drafter[State]):
    """Several drafters; a plan names the one that a round uses."""

    @property
    @abstractmethod
    def members(self) -> tuple[Member, ...]:
        """The drafters, in the pool's order."""

    @abstractmethod
    def counterfactuals(self, state: State) -> tuple[CounterfactualDraft, ...]:
        """What the last commit decided about trees that would have been drafted; see `StepRecord.counterfactuals`."""


AnyDrafter = Drafter[Any]


def piece_reader(drafter: AnyDrafter) -> PieceReader[Any] | None:
    """The drafter, if it reads prompts in pieces."""
    return drafter if isinstance(drafter, PieceReader) and drafter.reads_pieces else None
