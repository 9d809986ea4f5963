"""A drafter without drafts: plain decoding in the same loop."""

from dataclasses import dataclass

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.tree import TokenTree, root_only
from monge.draft.base import Capabilities, ModelFreeDrafter, model_free


@dataclass(frozen=True, slots=True)
class NoDrafter(ModelFreeDrafter[None]):
    """Propose nothing: every round is one plain step of the target."""

    @property
    def capabilities(self) -> Capabilities:
        return model_free(max_depth=0, max_width=0)

    def start(self, context: Context) -> None:
        return None

    def tree(self, context: Context, state: None, plan: DraftPlan, draws: Draws) -> TokenTree:
        return root_only(context.token_ids[-1])
