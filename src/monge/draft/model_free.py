"""Drafters without a network."""

from abc import abstractmethod
from collections.abc import Sequence

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.proposal import Deterministic
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, Drafter, State


class ModelFreeDrafter(Drafter[State]):
    """A drafter whose candidates are a function of committed text and finished rounds.

    The candidates are `Deterministic`: nothing is drawn.
    """

    @abstractmethod
    def start(self, context: Context) -> State:
        """Return the state of a new request."""

    @abstractmethod
    def tree(self, context: Context, state: State, plan: DraftPlan, draws: Draws) -> TokenTree:
        """Return the tree of a round; `draws` are only told about the nodes."""

    @abstractmethod
    def follow(self, context: Context, draft: Draft[State], verdict: Verdict) -> State:
        """Return the state after a commit."""

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
            Draft(self.tree(context, state, plan, own), state) for context, state, plan, own in rows
        ]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[State]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[State]:
        return [self.follow(*row) for row in zip(contexts, drafts, verdicts, strict=True)]

    def close(self, context: Context) -> None:
        return None


def model_free(*, max_depth: int, max_width: int = 1, num_successors: int = 0) -> Capabilities:
    """Return the capabilities of a model-free drafter; see `Capabilities`."""
    return Capabilities(
        proposes=frozenset({Deterministic}),
        max_width=max_width,
        max_depth=max_depth,
        needs_trees=max_width > 1,
        num_successors=num_successors,
        runs_network=False,
    )
