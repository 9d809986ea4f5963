"""A draft language model with the target's vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.law import SamplingRules, law_from_logits
from monge.core.model import NodeBlock, SequenceModel
from monge.core.tree import GrowingTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, Drafter
from monge.draft.tree.base import TreeBuilder

ReadNodes = tuple[int, ...]
"""State of one request: the tree's nodes that the draft model has read, in reading order. Its cache holds the text before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafter(Drafter[ReadNodes]):
    """Draft with a smaller language model that shares the target's vocabulary.

    The tree grows level by level: one forward of the draft model reads the frontier of every request of the batch, and the tree
    builder turns its laws into children. Text that the model has not read yet (a token it did not draft, or text committed
    while another drafter was in use) is read first, in the same forward as the root.

    Args:
        model: The draft model.
        tree: Shape of the tree and how children are drawn.
        rules: Sampling rules of the draft law; `None` drafts under the request's own.

    Reference:
        Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """

    model: SequenceModel
    tree: TreeBuilder
    rules: SamplingRules | None = None

    @property
    def capabilities(self) -> Capabilities:
        limits = self.tree.limits
        return Capabilities(
            proposes=limits.proposes,
            max_width=limits.max_width,
            max_depth=limits.max_depth,
            needs_trees=limits.max_width > 1,
            max_length=self.model.max_length,
        )

    def open(self, contexts: Sequence[Context]) -> Sequence[ReadNodes]:
        # All but the last token: a round starts by reading what is not read yet, the root at least.
        self.model.open({context.request_id: context.token_ids[:-1] for context in contexts})
        return [()] * len(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[ReadNodes],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[ReadNodes]]:
        rows = [
            _Row(context, plan, row_draws, GrowingTree(context.token_ids[-1]))
            for context, plan, row_draws in zip(contexts, plans, draws, strict=True)
        ]
        active = [row for row in rows if row.plan.depth(1) > 0 and row.plan.nodes(1) > 0]
        if active:
            logits = self._read_text(active)
            while active:
                for row in active:
                    row.grow(self.tree, logits[row.request_id], self.rules)
                active = [row for row in active if row.frontier]
                if active:
                    logits = self.model.extend({row.request_id: row.next_block() for row in active})
        return [Draft(self.tree.finish(row.tree, row.plan), tuple(row.read)) for row in rows]

    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[ReadNodes]], verdicts: Sequence[Verdict]
    ) -> Sequence[ReadNodes]:
        paths: dict[int, list[int]] = {}
        for context, draft, verdict in zip(contexts, drafts, verdicts, strict=True):
            slot_of = {node: slot for slot, node in enumerate(draft.state)}
            paths[context.request_id] = [slot_of[node] for node in verdict.path if node in slot_of]
        self.model.commit(paths)
        return [()] * len(contexts)

    def close(self, context: Context) -> None:
        self.model.close(context.request_id)

    def _read_text(self, rows: Sequence["_Row"]) -> Mapping[int, Tensor]:
        unread = {row.request_id: row.context.token_ids[self.model.length(row.request_id) :] for row in rows}
        logits = self.model.extend({request: NodeBlock.chain(tokens) for request, tokens in unread.items()})
        self.model.commit({request: range(len(tokens)) for request, tokens in unread.items()})
        return {request: rows_logits[-1:] for request, rows_logits in logits.items()}


class _Row:
    """One request while its tree grows."""

    def __init__(self, context: Context, plan: DraftPlan, draws: Draws, tree: GrowingTree) -> None:
        self.context, self.plan, self.draws, self.tree = context, plan, draws, tree
        self.request_id = context.request_id
        self.frontier: tuple[int, ...] = (0,)
        self.read: list[int] = []

    def grow(self, builder: TreeBuilder, logits: Tensor, rules: SamplingRules | None) -> None:
        laws = [
            law_from_logits(logits[index], rules or self.context.rules) for index in range(len(self.frontier))
        ]
        self.frontier = tuple(builder.expand(self.tree, self.frontier, laws, self.plan, self.draws))

    def next_block(self) -> NodeBlock:
        slot_of = {node: slot for slot, node in enumerate(self.read)}
        self.read.extend(self.frontier)
        return NodeBlock(
            tuple(self.tree.token_ids[node] for node in self.frontier),
            tuple(slot_of.get(self.tree.parents[node], -1) for node in self.frontier),
        )
