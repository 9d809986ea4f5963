"""A draft language model with the target's vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.model import NodeBlock, SequenceModel
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import TokenTree, root_only
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, PieceReader
from monge.draft.growth import Growth, LevelReader, check_top_k, draft_rules, grow_together
from monge.draft.tree.base import TreeBuilder

_CATCH_UP: Final = 16
"""Most unread tokens that are read with full logits: a second forward costs more."""

ReadPaths = tuple[tuple[int, ...], ...]
"""State of one request: the nodes that the draft model has read behind the committed text, in reading order, each as the tokens
on its path. A builder may prune and so renumber the tree; a path stays valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafter(PieceReader[ReadPaths]):
    """Draft with a smaller language model that shares the target's vocabulary.

    The tree grows level by level: one forward of the draft model reads the frontier of every
    request of the batch, and the tree builder turns its laws into children. Unread text (a token
    that it did not draft, or text of rounds that used another drafter) is read first, in the same
    forward as the root.

    Args:
        model: The draft model.
        tree: Shape of the tree and how children are drawn.
        rules: Sampling rules of the draft law; `None` drafts under the request's own. Trees of the
            most probable tokens draw nothing and only rank, so they are built from the law at
            temperature 1: a greedy request's law ranks one token.
        top_k: Draft from the `top_k` most probable tokens only: the same rules, with this top-k
            where theirs is wider. The declared law is the truncated one, so verification stays
            exact, and looks at no other token of the draft law.

    Reference:
        Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """

    model: SequenceModel
    tree: TreeBuilder
    rules: SamplingRules | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        check_top_k(self.top_k)

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

    def open(self, contexts: Sequence[Context]) -> Sequence[ReadPaths]:
        # All but the last token: a round starts by reading the unread tokens, at least the root.
        self.model.open({context.request_id: context.token_ids[:-1] for context in contexts})
        return [()] * len(contexts)

    def read(self, contexts: Sequence[Context]) -> None:
        ids = [context.request_id for context in contexts]
        texts = [context.token_ids[:-1] for context in contexts]
        self.model.append(
            {one: text[self.model.length(one) :] for one, text in zip(ids, texts, strict=True)}
        )

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[ReadPaths],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[ReadPaths]]:
        if all(plan.max_depth == 0 for plan in plans):
            return [Draft(root_only(context.token_ids[-1]), ()) for context in contexts]
        rows = [
            self._row(context, plan, row_draws)
            for context, plan, row_draws in zip(contexts, plans, draws, strict=True)
        ]
        active = [row for row in rows if row.may_draft]
        if active:
            grow_together(
                active,
                self._read_text(active),
                LevelReader(read=self._read_level, restore=self._restore),
            )
        return [
            Draft(row.finish(), tuple(row.paths), row.token_probs, error=row.error) for row in rows
        ]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[ReadPaths]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[ReadPaths]:
        if not any(draft.state for draft in drafts):
            return [()] * len(contexts)  # nothing was read
        paths: dict[int, list[int]] = {}
        for context, draft, verdict in zip(contexts, drafts, verdicts, strict=True):
            paths[context.request_id] = read_slots(draft.state, draft.tree, verdict)
        self.model.commit(paths)
        return [()] * len(contexts)

    def close(self, context: Context) -> None:
        self.model.close(context.request_id)

    def _row(self, context: Context, plan: DraftPlan, draws: Draws) -> Growth:
        return Growth(
            context=context,
            plan=plan,
            draws=draws,
            builder=self.tree,
            rules=draft_rules(self.tree, context.rules, self.rules, self.top_k),
            network="draft model",
        )

    def _read_level(self, rows: Sequence[Growth]) -> Mapping[int, Tensor]:
        return self.model.extend({row.request_id: row.block() for row in rows})

    def _restore(self, row: Growth) -> None:
        self.model.commit({row.request_id: ()})
        for block in row.blocks:
            self.model.extend({row.request_id: block})

    def _read_text(self, rows: Sequence[Growth]) -> Mapping[int, Tensor]:
        texts = {row.request_id: row.context.token_ids for row in rows}
        return read_text(self.model, texts)


def read_text(
    model: SequenceModel, texts: Mapping[int, tuple[int, ...]]
) -> Mapping[int, Float[Tensor, "one vocab"]]:
    """Read and commit the unread part of texts, and return the logits after the last token.

    Args:
        model: The network.
        texts: Committed tokens by request; the last one of each is unread.
    """
    unread = {request: tokens[model.length(request) :] for request, tokens in texts.items()}
    # After many rounds without drafts only the logits of the last token are computed.
    if behind := {
        request: tokens[:-1] for request, tokens in unread.items() if len(tokens) > _CATCH_UP
    }:
        model.append(behind)
        unread |= {request: texts[request][-1:] for request in behind}
    logits = model.extend({request: NodeBlock.chain(tokens) for request, tokens in unread.items()})
    model.commit({request: range(len(tokens)) for request, tokens in unread.items()})
    return {request: own[-1:] for request, own in logits.items()}


def read_slots(read: ReadPaths, tree: TokenTree, verdict: Verdict) -> list[int]:
    """Return the indices of the accepted path among the nodes that a network has read."""
    slot_of = {path: slot for slot, path in enumerate(read)}
    accepted = tuple(tree.token_ids[node] for node in verdict.path)
    prefixes = (accepted[: depth + 1] for depth in range(len(accepted)))
    return [slot_of[prefix] for prefix in prefixes if prefix in slot_of]
