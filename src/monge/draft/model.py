"""A draft language model with the target's vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.draft.base import AnyDraft, Capabilities, ChunkedPrefill, Draft, provided
from monge.draft.growth import (
    LevelForward,
    check_top_k,
    expand_trees,
    expansions,
    tree_capabilities,
)
from monge.draft.tree.base import TreeBuilder
from monge.laws.draws import Draws
from monge.laws.tree import root_only
from monge.networks.base import NodeBlock, SequenceModel, draft_length

_CATCH_UP: Final = 16
"""Most unread tokens that are read with full logits: a second forward costs more."""

ReadPaths = tuple[tuple[int, ...], ...] | None
"""State of a request: the nodes that the draft model has read after the committed text, in reading
order, each as the tokens on its path. A builder may prune and so renumber the tree; a path stays
valid. `None` stands for the nodes with children of a tree that was drawn at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ChunkedPrefill[ReadPaths]):
    """Draft with a smaller language model that shares the target's vocabulary.

    The tree grows level by level: one forward of the draft model reads the frontier of every
    request of the batch, and the tree builder turns its laws into children. Unread text (a token
    that it did not draft, or text of rounds that used another drafter) is read first, in the same
    forward as the root.

    Args:
        model: The draft model; `None` for that of `monge.load`.
        tree: Shape of the tree and how children are drawn; `None` for that of `monge.load`.
        rules: Sampling rules of the draft law; `None` drafts under the request's own. Trees of the
            most probable tokens draw nothing and only rank, so they are built from the law at
            temperature 1: a greedy request's law ranks one token.
        top_k: Draft from the `top_k` most probable tokens only: the same rules, with this top-k
            where theirs is wider. The declared law is the truncated law, so verification stays
            exact, and reads no other token of the draft law.

    Reference:
        Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; across tokenizers: TLI, Timor
        et al., arXiv 2502.05202.
    """

    model: SequenceModel | None = field(default=None, repr=False)
    tree: TreeBuilder | None = None
    rules: SamplingRules | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        check_top_k(self.top_k)

    @property
    def capabilities(self) -> Capabilities:
        return tree_capabilities(provided(self.tree).limits, max_length=draft_length(self._network))

    def open(self, contexts: Sequence[Context]) -> Sequence[ReadPaths]:
        open_texts(self._network, contexts)
        return [()] * len(contexts)

    def read(self, contexts: Sequence[Context]) -> None:
        append_texts(self._network, contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[ReadPaths],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[AnyDraft[ReadPaths]]:
        model = self._network
        plans = within_reach(model, contexts, plans)
        if all(plan.max_depth == 0 for plan in plans):
            return [Draft(root_only(context.token_ids[-1]), ()) for context in contexts]
        rows = expansions(
            contexts,
            plans,
            draws,
            tree=provided(self.tree),
            rules=self.rules,
            top_k=self.top_k,
            network="draft model",
        )
        if active := [row for row in rows if row.may_draft]:
            logits = read_text(model, {row.request_id: row.context.token_ids for row in active})
            forward = LevelForward(
                extend=model.extend,
                reset=lambda row: model.commit({row.request_id: ()}),
                draw=getattr(model, "draw_trees", None),
            )
            expand_trees(active, logits, forward)
        return [row.draft(tuple(row.read.paths) if row.drawn is None else None) for row in rows]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[ReadPaths]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[ReadPaths]:
        read = [draft.state for draft in drafts]
        commit_accepted(self._network, contexts, drafts, read, verdicts)
        return [()] * len(contexts)

    def close(self, context: Context) -> None:
        self._network.close(context.request_id)

    @property
    def _network(self) -> SequenceModel:
        return provided(self.model)


def open_texts(model: SequenceModel, contexts: Sequence[Context]) -> None:
    """Open requests with all but their last token: a round starts by reading the unread tokens."""
    model.open({context.request_id: context.token_ids[:-1] for context in contexts})


def append_texts(model: SequenceModel, contexts: Sequence[Context]) -> None:
    """Read the new prompt tokens of open requests, except the last token of each context."""
    texts = {context.request_id: context.token_ids[:-1] for context in contexts}
    model.append({request: text[model.length(request) :] for request, text in texts.items()})


def within_reach(
    model: SequenceModel,
    contexts: Sequence[Context],
    plans: Sequence[DraftPlan],
    *,
    mixed: bool = False,
) -> list[DraftPlan]:
    """Return plans that a draft model with another tokenizer can follow, whatever is drawn.

    Args:
        model: The draft model; any other changes nothing.
        contexts: The requests.
        plans: Their plans.
        mixed: See `ForeignModel.reach`.
    """
    reach = getattr(model, "reach", None)
    if reach is None:
        return list(plans)
    return [
        plan.reaching(
            len(context.token_ids), reach(context.request_id, context.token_ids, mixed=mixed)
        )
        for context, plan in zip(contexts, plans, strict=True)
    ]


def read_text(
    model: SequenceModel, texts: Mapping[int, tuple[int, ...]]
) -> Mapping[int, Float[Tensor, "one vocab"]]:
    """Read and commit the unread part of texts, and return the logits after the last token.

    Args:
        model: The network.
        texts: Committed tokens by request; the last token of each is unread.
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
    return {request: node_logits[-1:] for request, node_logits in logits.items()}


def commit_accepted(
    model: SequenceModel,
    contexts: Sequence[Context],
    drafts: Sequence[Draft[Any]],
    read: Sequence[ReadPaths],
    verdicts: Sequence[Verdict],
) -> None:
    """Commit the accepted paths among the nodes that a network has read, and drop its other nodes."""
    slots: dict[int, list[int]] = {}
    for context, draft, known, verdict in zip(contexts, drafts, read, verdicts, strict=True):
        tree = draft.tree
        inner = (node for node in range(1, tree.num_nodes) if tree.candidates[node])
        paths = map(tree.path_tokens, inner) if known is None else known
        slot_of = {path: slot for slot, path in enumerate(paths)}
        accepted = tuple(draft.tree.token_ids[node] for node in verdict.path)
        prefixes = (accepted[: depth + 1] for depth in range(len(accepted)))
        slots[context.request_id] = [slot_of[prefix] for prefix in prefixes if prefix in slot_of]
    model.commit(slots)
