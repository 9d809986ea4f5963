"""Drafts with a head that reads the target's hidden states, of whatever kind."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import AnyDraft, Capabilities, Drafter
from monge.draft.growth import LevelForward, expand_trees, expansions
from monge.draft.tree.base import TreeBuilder
from monge.laws.draws import Draws
from monge.networks.base import FeatureModel, NodeBlock, SequenceModel, WatchedStates

_CHUNK: Final = 1024
"""Most tokens of a text that a forward of the head reads."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Committed tokens that the target has read, each with the token after it.

    Args:
        features: The target's watched states, side by side.
        token_ids: The tokens after them.
    """

    features: Float[Tensor, "nodes width"]
    token_ids: tuple[int, ...]


def chunks(features: Float[Tensor, "nodes width"], token_ids: tuple[int, ...]) -> list[Pairs]:
    """Return the pairs of a text in as few parts as the head reads them: each costs a forward."""
    parts = (slice(start, start + _CHUNK) for start in range(0, len(token_ids), _CHUNK))
    return [Pairs(features[part], token_ids[part]) for part in parts]


def rows_of(tensors: Sequence[Float[Tensor, "_ width"]]) -> Float[Tensor, "nodes width"]:
    """Return tensors concatenated by rows; a single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


Text = TypeVar("Text")


class HeadRun(ABC, Generic[Text]):
    """A head at work: it reads committed tokens, then level after level of a tree.

    Like a network's cache, it holds what it has read, by request.
    """

    def __init__(self) -> None:
        self._texts: dict[int, Text] = {}

    @abstractmethod
    def open(self, request: int) -> None:
        """Start a text without any states."""

    def close(self, request: int) -> None:
        """Drop a text."""
        self._texts.pop(request, None)

    @abstractmethod
    def knows(self, request: int) -> bool:
        """Return whether a state of this text has been read, so that something can be drafted."""

    @abstractmethod
    def read(self, pairs: Mapping[int, Pairs]) -> None:
        """Read committed tokens, after all that were read before."""

    @abstractmethod
    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one some"]]:
        """Start a round and return the logits after the last committed token of each text.

        Args:
            roots: These tokens, by request.
        """

    @abstractmethod
    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes some"]]:
        """Read a level and return the logits after each of its nodes."""

    @abstractmethod
    def end(self, requests: Sequence[int]) -> None:
        """Drop what was drafted in this round."""


def known(tensor: Tensor | None) -> Tensor:
    """Return a tensor that was computed before; see `HeadRun.knows`."""
    assert tensor is not None
    return tensor


def check_shows_states(drafter: str, target: SequenceModel) -> FeatureModel:
    """Return the target if it shows its hidden states.

    Raises:
        OptionError: If it does not.
    """
    if not isinstance(target, FeatureModel):
        raise OptionError(
            f"drafter {drafter!r} needs a target that shows its hidden states; "
            f"{type(target).__name__} does not; use drafter='model' or 'ngram'"
        )
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDrafter(Drafter[None]):
    """Draft with a running head.

    The target's log keeps what the head has not read, so that plain rounds between two drafts cost nothing here.

    Args:
        run: The head.
        states: The target's hidden states that it reads.
        declared: Capabilities.
        tree: Shape of the tree and how children are drawn.
        rules: See `expansions`.
        top_k: See `expansions`.
        network: Name of the head, for warnings.
        draft_ids: The tokens that its logits are about, ascending; `None` for all of the target's.
    """

    run: HeadRun[Any]
    states: WatchedStates
    declared: Capabilities
    tree: TreeBuilder
    rules: SamplingRules | None
    top_k: int | None
    network: str
    draft_ids: Int64[Tensor, " some"] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self.declared

    def open(self, contexts: Sequence[Context]) -> Sequence[None]:
        for context in contexts:
            self.run.open(context.request_id)
        return [None] * len(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[None],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[AnyDraft[None]]:
        rows = expansions(
            contexts,
            plans,
            draws,
            tree=self.tree,
            rules=self.rules,
            top_k=self.top_k,
            network=self.network,
            draft_ids=self.draft_ids,
        )
        with torch.inference_mode():
            pairs = zip(rows, contexts, strict=True)
            self._read([context for row, context in pairs if row.may_draft])
            active = [row for row in rows if row.may_draft and self.run.knows(row.request_id)]
            if active:
                logits = self.run.begin({row.request_id: row.root for row in active})
                forward = LevelForward(
                    extend=self.run.extend,
                    reset=lambda row: self.run.end([row.request_id]),
                    max_depth=self.declared.max_depth,
                    draw=getattr(self.run, "draw_trees", None),
                )
                expand_trees(active, logits, forward)
                self.run.end([row.request_id for row in active])
        return [row.draft(None) for row in rows]

    def close(self, context: Context) -> None:
        self.run.close(context.request_id)

    def _read(self, contexts: Sequence[Context]) -> None:
        """Read what the target has read since the last draft: the text's end but its last token."""
        parts = dict[int, list[Pairs]]()
        for context in contexts:
            features: Tensor | None = self.states.take(context.request_id)
            if features is not None:
                start = len(context.token_ids) - len(features)
                parts[context.request_id] = chunks(features, context.token_ids[start:])
        while parts := {request: waiting for request, waiting in parts.items() if waiting}:
            self.run.read({request: waiting.pop(0) for request, waiting in parts.items()})


class TargetEnds:
    """The target's embedding and output layer, in the type in which a head computes."""

    def __init__(self, target: FeatureModel) -> None:
        self._target = target
        kind = target.embed((0,))
        self.dtype, self.device = kind.dtype, kind.device

    def embed(
        self, token_ids: Sequence[int] | Int64[Tensor, " nodes"]
    ) -> Float[Tensor, "nodes hidden"]:
        """Return the target's embeddings."""
        return self._target.embed(token_ids)

    def ids(self, token_ids: Sequence[int]) -> Tensor:
        """Return tokens as a tensor beside the weights."""
        return torch.tensor(list(token_ids)).to(self.device, non_blocking=True)

    def unembed(self, states: Tensor) -> Tensor:
        """Return the target's logits of last states."""
        return self._target.unembed(states.to(self.dtype))
