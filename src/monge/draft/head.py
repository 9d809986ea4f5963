"""A published head as a drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.model import FeatureModel, ModuleHost, SequenceModel, WatchedStates
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, Drafter
from monge.draft.block_run import BlockRun
from monge.draft.eagle import ChainRun
from monge.draft.growth import Growth, LevelReader, check_top_k, draft_rules, grow_together
from monge.draft.head_run import HeadRun, Pairs, TargetEnds
from monge.draft.medusa import StepRun
from monge.draft.tree.base import TreeBuilder
from monge.heads.readers.base import BlockHead, ChainHead, PublishedHead, StepHead
from monge.heads.readers.registry import load_head
from monge.heads.target import TargetSizes

Unread = tuple[Pairs, ...]
"""State of one request: tokens that the target has read and the head has not."""

_PART: Final = 1024
"""Most tokens of a text that one forward of the head reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDrafter(Drafter[Unread]):
    """Draft with a head that was published for the target.

    Medusa, Hydra, EAGLE, DFlash or a prediction module.

    The format is recognised from the folder; see `monge.heads.readers`. The target's own passes
    leave hidden states of the committed text behind, which the head reads together with the tokens
    after them; then the tree grows level by level under the head's laws. What it makes of its own
    predictions is forgotten at the end of the round. A request whose states are not known yet (a
    prompt of one token) drafts nothing in its first round.

    Args:
        head: The head, its folder, or the file of its tensors.
        target: The target, which must show its hidden states; it is asked to keep those that the
            head reads.
        tree: Shape of the tree and how children are drawn.
        rules: Sampling rules of the draft law; `None` drafts under the request's own. Trees of the
            most probable tokens draw nothing and only rank, so they are built from the law at
            temperature 1.
        top_k: Draft from this number of the head's most probable tokens, renormalised; the declared
            law is the truncated one.

    Raises:
        OptionError: If no head is given, the target shows no hidden states, or the head is for
            another one.
        ModelLoadError: If the head cannot be read.

    Reference:
        As for the families, in `monge.heads.readers`.
    """

    head: PublishedHead | str | Path | None = None
    target: SequenceModel
    tree: TreeBuilder
    rules: SamplingRules | None = None
    top_k: int | None = None
    _states: WatchedStates = field(init=False, repr=False, compare=False)
    _head: PublishedHead = field(init=False, repr=False, compare=False)
    _run: HeadRun = field(init=False, repr=False, compare=False)
    # Numbers, bytes, and bytes of a token, counted once.
    _size: tuple[int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.head is None:
            raise OptionError(
                "drafter 'head' needs a head: give its folder as the draft, or write head('folder')"
            )
        if not isinstance(self.target, FeatureModel):
            raise OptionError(
                "drafter 'head' needs a target that shows its hidden states; "
                f"{type(self.target).__name__} does not; use "
                "drafter='model' or 'ngram'"
            )
        check_top_k(self.top_k)
        head = self.head if isinstance(self.head, PublishedHead) else load_head(self.head)
        head.check(TargetSizes.of(self.target))
        ends = TargetEnds(self.target)
        head = head.to(device=ends.device, dtype=ends.dtype).eval()
        states = self.target.watch(head.layers(self.target.num_layers))
        sizes = head.num_parameters, head.num_bytes, head.bytes_per_token
        if isinstance(self.target, ModuleHost) and head is not self.head:
            self.target.pack_module(head)
        host = self.target if isinstance(self.target, ModuleHost) else None
        made = {"_states": states, "_head": head, "_run": run_of(head, ends, host)}
        for name, value in {**made, "_size": sizes}.items():
            object.__setattr__(self, name, value)

    @property
    def capabilities(self) -> Capabilities:
        limits, most = self.tree.limits, self._head.max_depth
        return Capabilities(
            proposes=limits.proposes,
            max_width=limits.max_width,
            max_depth=limits.max_depth if most is None else min(limits.max_depth, most),
            needs_trees=limits.max_width > 1,
            num_parameters=self._size[0],
            num_bytes=self._size[1],
            bytes_per_token=self._size[2],
            reads_states=True,
        )

    def open(self, contexts: Sequence[Context]) -> Sequence[Unread]:
        for context in contexts:
            self._run.open(context.request_id)
        return [self._fresh(context) for context in contexts]

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[Unread],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[Unread]]:
        rows = [
            self._growth(context, plan, row_draws)
            for context, plan, row_draws in zip(contexts, plans, draws, strict=True)
        ]
        unread = {
            row.request_id: state for row, state in zip(rows, states, strict=True) if row.may_draft
        }
        with torch.inference_mode():
            self._read(unread)
            self._grow([row for row in rows if row.may_draft and self._run.knows(row.request_id)])
        return [
            Draft(row.finish(), () if row.may_draft else state, row.token_probs, error=row.error)
            for row, state in zip(rows, states, strict=True)
        ]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[Unread]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[Unread]:
        return [
            (*draft.state, *self._fresh(context))
            for context, draft in zip(contexts, drafts, strict=True)
        ]

    def close(self, context: Context) -> None:
        self._run.close(context.request_id)

    def _fresh(self, context: Context) -> Unread:
        """What the target has read since the last question.

        The end of the text but for its last token.
        """
        features: Tensor | None = self._states.take(context.request_id)
        if features is None:
            return ()
        end = len(context.token_ids) - 1
        positions = range(end - len(features), end)
        return (Pairs(features, context.token_ids[positions.start + 1 :], positions),)

    def _growth(self, context: Context, plan: DraftPlan, draws: Draws) -> Growth:
        return Growth(
            context=context,
            plan=plan,
            draws=draws,
            builder=self.tree,
            rules=draft_rules(self.tree, context.rules, self.rules, self.top_k),
            network=f"{self._head.family} head",
            draft_ids=self._head.draft_ids,
        )

    def _read(self, unread: dict[int, Unread]) -> None:
        parts = {
            request: [part for pairs in state for part in pairs.split(_PART)]
            for request, state in unread.items()
        }
        while parts := {request: waiting for request, waiting in parts.items() if waiting}:
            self._run.read({request: waiting.pop(0) for request, waiting in parts.items()})

    def _grow(self, rows: Sequence[Growth]) -> None:
        if not rows:
            return
        logits = self._run.begin({row.request_id: row.context.token_ids[-1] for row in rows})
        reader = LevelReader(
            read=self._read_level, restore=self._restore, max_depth=self._head.max_depth
        )
        grow_together(rows, logits, reader)
        self._run.end([row.request_id for row in rows])

    def _read_level(self, rows: Sequence[Growth]) -> Mapping[int, Tensor]:
        return self._run.extend({row.request_id: row.block() for row in rows})

    def _restore(self, row: Growth) -> None:
        self._run.end([row.request_id])
        self._run.begin({row.request_id: row.context.token_ids[-1]})
        for block in row.blocks:
            self._run.extend({row.request_id: block})


def run_of(head: PublishedHead, ends: TargetEnds, host: ModuleHost | None = None) -> HeadRun:
    """What runs a head of this kind, and programs of it in a backend if there is one."""
    if isinstance(head, StepHead):
        return StepRun(head, ends)
    if isinstance(head, ChainHead):
        return ChainRun(head, ends, host)
    assert isinstance(head, BlockHead), f"{type(head).__name__} is of no known kind"
    return BlockRun(head, ends)
