"""A drafter without drafts: plain decoding in the same loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.proposal import Deterministic
from monge.core.tree import root_only
from monge.draft.base import Capabilities, Draft, StatelessDrafter


@dataclass(frozen=True, slots=True)
class NoDrafter(StatelessDrafter):
    """Propose nothing: every round is one plain step of the target."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            proposes=frozenset({Deterministic}),
            max_width=0,
            max_depth=0,
            needs_trees=False,
            runs_network=False,
        )

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[None],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[None]]:
        return [Draft(root_only(context.token_ids[-1]), None) for context in contexts]
