"""The drafter interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.parts import Part
from monge.core.selection import CounterfactualDraft, Member
from monge.core.verdict import Verdict
from monge.laws.draws import Draws
from monge.laws.proposal import Deterministic, Proposal
from monge.laws.tree import FutureTree, TokenTree, root_only
from monge.networks.base import NodeBlock

State = TypeVar("State")
Resource = TypeVar("Resource")


@dataclass(frozen=True, slots=True)
class Draft(Generic[State]):
    """The draft of a request.

    Args:
        tree: The tree.
        state: The drafter's state after drawing it.
        drafter: Name of the drafter of a pool that drew it.
    """

    tree: TokenTree
    state: State
    drafter: str | None = None

    @property
    def block(self) -> NodeBlock:
        """All nodes of the tree, as a target reads them."""
        return NodeBlock(self.tree.token_ids, self.tree.parents)

    def result(self) -> "Draft[State]":
        """Return itself; see `FutureDraft.result`."""
        return self


@dataclass(frozen=True, slots=True)
class FutureDraft(Generic[State]):
    """The draft of a request whose tree a device still draws; fields as in `Draft`."""

    tree: FutureTree
    state: State
    drafter: str | None = None

    @property
    def block(self) -> NodeBlock:
        """All nodes of the tree, as a target reads them without a wait."""
        return NodeBlock(self.tree, self.tree.parents)

    def result(self) -> Draft[State]:
        """Wait for the device, and return the draft."""
        return Draft(self.tree.result(), self.state, drafter=self.drafter)


AnyDraft = Draft[State] | FutureDraft[State]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declarations of a drafter, compared with the verifier before decoding.

    Args:
        proposes: Kinds of proposals it may use.
        max_width: Most candidates of a node; `None` for unbounded.
        max_depth: Deepest node it may draft.
        needs_trees: Whether it may draw more than a chain, so that the target must read trees.
        max_nodes: Most nodes that it may draft; `None` if the limit is unknown.
        max_length: Longest text that it reads, in tokens; `None` for unbounded. Trees become less
            deep as it ends, and a longer text is decoded plainly.
        num_parameters: Parameters that it has beside the networks, such as those of a head.
        num_bytes: Memory of these parameters.
        bytes_per_token: Memory for each token of a text, beside the caches of the networks.
        reads_states: Whether it reads the target's hidden states.
        runs_network: Whether drafting needs forwards of a network. Model-free drafters do not, so
            they may draft in every round.
        reads_others: Whether drafts of a request depend on texts of other requests.
    """

    proposes: frozenset[type[Proposal]]
    max_width: int | None
    max_depth: int
    needs_trees: bool
    max_nodes: int | None = None
    max_length: int | None = None
    num_parameters: int = 0
    num_bytes: int = 0
    bytes_per_token: int = 0
    reads_states: bool = False
    runs_network: bool = True
    reads_others: bool = False


def provided(resource: Resource | None) -> Resource:
    """Return a network or tree of a drafter, which `monge.load` provides.

    Raises:
        OptionError: If it is not there.
    """
    if resource is None:
        raise OptionError(
            "this drafter has no network yet: give it to monge.load as drafter=..., or make it "
            "with its network and tree"
        )
    return resource


class Drafter(Part, ABC, Generic[State]):
    """Draws a tree for every request of a batch. State is passed in and returned.

    An error of `open`, `draft` or `observe` turns the drafter off for all requests of that call,
    which are decoded plainly from there on. If `draft` raises after a draw of any of them, the
    requests of the round end with `DrafterError`.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Declarations of the drafter."""

    @abstractmethod
    def open(self, contexts: Sequence[Context]) -> Sequence[State]:
        """Return the states of new requests, from their prompts."""

    @abstractmethod
    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[State],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[AnyDraft[State]]:
        """Draw a tree per request, within its plan; row i draws from `draws[i]` only.

        A request whose plan is plain decoding (depth 0) may be skipped: its draft is
        the root only, with the state unchanged.

        Every drawn token must be in the tree: to draw again, or to drop a drawn token, biases the
        text.
        """

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[State]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[State]:
        """Return the states after the verdicts; by default, those after drawing.

        In a pool, the tree of a draft may come from another drafter; its state is always from this
        drafter.

        Args:
            contexts: The requests; they already have the committed tokens.
            drafts: Their drafts.
            verdicts: Their verdicts.
        """
        return [draft.state for draft in drafts]

    def close(self, context: Context) -> None:
        """Release everything that the drafter keeps for a request; by default, there is nothing."""


class ModelFreeDrafter(Drafter[State]):
    """A drafter whose candidates are a function of committed text and finished rounds.

    The candidates are `Deterministic`: nothing is drawn.
    """

    @abstractmethod
    def start(self, context: Context) -> State:
        """Return the state of a new request."""

    @abstractmethod
    def tree(self, context: Context, state: State, plan: DraftPlan, draws: Draws) -> TokenTree:
        """Return the tree of a round; `draws` only go to `GrowingTree.grow`, which draws nothing here."""

    def follow(self, context: Context, draft: Draft[State], verdict: Verdict) -> State:
        """Return the state after a commit; by default, the same."""
        return draft.state

    def open(self, contexts: Sequence[Context]) -> Sequence[State]:
        return [self.start(context) for context in contexts]

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[State],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[State]]:
        rows = zip(contexts, states, plans, draws, strict=True)
        return [
            Draft(self.tree(context, state, plan, row_draws), state)
            for context, state, plan, row_draws in rows
        ]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[State]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[State]:
        return [self.follow(*row) for row in zip(contexts, drafts, verdicts, strict=True)]


def model_free(
    *,
    max_depth: int,
    max_width: int = 1,
    max_nodes: int | None = None,
    reads_others: bool = False,
) -> Capabilities:
    """Return the capabilities of a model-free drafter; see `Capabilities`."""
    return Capabilities(
        proposes=frozenset({Deterministic}),
        max_width=max_width,
        max_depth=max_depth,
        needs_trees=max_width > 1,
        max_nodes=max_depth if max_width <= 1 else max_nodes,
        runs_network=False,
        reads_others=reads_others,
    )


@dataclass(frozen=True, slots=True)
class NoDrafter(ModelFreeDrafter[None]):
    """Propose nothing: every round is a plain step of the target."""

    @property
    def capabilities(self) -> Capabilities:
        return model_free(max_depth=0, max_width=0)

    def start(self, context: Context) -> None:
        return None

    def tree(self, context: Context, state: None, plan: DraftPlan, draws: Draws) -> TokenTree:
        return root_only(context.token_ids[-1])


class DelegatingDrafter(Drafter[State]):
    """A drafter that prepares another drafter and passes every call on to it."""

    _drafter: Any

    @property
    def capabilities(self) -> Capabilities:
        return provided(self._drafter).capabilities

    def open(self, contexts: Sequence[Context]) -> Sequence[State]:
        return self._drafter.open(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[State],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[AnyDraft[State]]:
        return self._drafter.draft(contexts, states, plans, draws)

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[State]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[State]:
        return self._drafter.observe(contexts, drafts, verdicts)

    def close(self, context: Context) -> None:
        self._drafter.close(context)


class ChunkedPrefill(Drafter[State]):
    """A drafter whose network can read a prompt in chunks.

    It is opened on the first chunk. At its first draft it reads the part that is still unread.
    """

    @property
    def prefills_in_chunks(self) -> bool:
        """True if it reads prompts in chunks. A drafter that is made of several drafters may not."""
        return True

    @abstractmethod
    def read(self, contexts: Sequence[Context]) -> None:
        """Read the new prompt tokens of open requests, except the last token of each context."""


class DrafterPool(Drafter[State]):
    """Several drafters; the plan of a round names one of them."""

    @property
    @abstractmethod
    def members(self) -> tuple[Member, ...]:
        """The drafters, in their order in the pool."""

    @abstractmethod
    def counterfactuals(self, state: State) -> tuple[CounterfactualDraft, ...]:
        """Return the results of shadow drafts; see `StepRecord.counterfactuals`."""


AnyDrafter = Drafter[Any]


def chunked_prefill(drafter: AnyDrafter) -> ChunkedPrefill[Any] | None:
    """Return the drafter if it reads prompts in chunks, else `None`."""
    return drafter if isinstance(drafter, ChunkedPrefill) and drafter.prefills_in_chunks else None
