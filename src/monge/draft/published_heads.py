"""A published head as a drafter."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import DelegatingDrafter
from monge.draft.block_run import BlockRun
from monge.draft.eagle import ChainRun
from monge.draft.growth import check_top_k, tree_capabilities
from monge.draft.head_run import HeadRun, RunDrafter, TargetEnds, check_shows_states
from monge.draft.tree.base import TreeBuilder
from monge.heads.readers.base import ChainHead, PublishedHead
from monge.heads.readers.block import DFlashHead
from monge.heads.readers.registry import load_head
from monge.heads.readers.steps import BlockStep, ChainStep
from monge.networks.base import FeatureModel, SequenceModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(DelegatingDrafter[None]):
    """Draft with a head that was published for the target: EAGLE-3, DFlash, DSpark or a prediction module.

    The format is recognised from the folder; see `monge.heads.readers`. The head reads the hidden
    states of the committed text, which the target's forwards produce, and the tokens after them.
    Then the tree grows level by level under the head's laws. At the end of the round, the head
    drops what it has read of its own predictions. A request without hidden states (a prompt of a
    single token) drafts nothing in its first round.

    Args:
        head: The head, its folder, or the file of its tensors.
        target: The target, which must show its hidden states and keeps those that the head reads;
            `None` for that of `monge.load`.
        tree: Shape of the tree and how children are drawn; `None` for that of `monge.load`.
        rules: See `Model`.
        top_k: See `Model`.

    Raises:
        OptionError: If no head is given, the target shows no hidden states, or the head is for
            another target.
        ModelLoadError: If the head cannot be read.

    Reference:
        As for the families, in `monge.heads.readers`.
    """

    head: PublishedHead | str | Path | None = None
    target: SequenceModel | None = field(default=None, repr=False)
    tree: TreeBuilder | None = None
    rules: SamplingRules | None = None
    top_k: int | None = None
    _drafter: RunDrafter | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.target is None or self.tree is None:
            return
        if self.head is None:
            raise OptionError(
                "drafter 'head' needs a head: give its folder as the draft, or write head('folder')"
            )
        target = check_shows_states("head", self.target)
        check_top_k(self.top_k)
        head = self.head if isinstance(self.head, PublishedHead) else load_head(self.head)
        head.check(target)
        ends = TargetEnds(target)
        head = head.to(device=ends.device, dtype=ends.dtype).eval()
        states = target.watch(head.layers(target.num_layers))
        declared = tree_capabilities(
            self.tree.limits,
            max_depth=head.max_depth,
            num_parameters=head.num_parameters,
            num_bytes=head.num_bytes,
            bytes_per_token=head.bytes_per_token,
            reads_states=True,
        )
        if head is not self.head:
            target.pack_module(head)
        drafter = RunDrafter(
            run=run_of(head, target, ends),
            states=states,
            declared=declared,
            tree=self.tree,
            rules=self.rules,
            top_k=self.top_k,
            network=f"{head.family} head",
            draft_ids=head.draft_ids,
        )
        object.__setattr__(self, "_drafter", drafter)


def run_of(head: PublishedHead, target: FeatureModel, ends: TargetEnds) -> HeadRun[Any]:
    """Return the run of a head of this kind, with a cache and forwards of the target's backend."""
    if isinstance(head, ChainHead):
        read, step = (ChainStep(head, ends.unembed, fuses=fuses).eval() for fuses in (True, False))
        return ChainRun(target.head_model(read, step))
    assert isinstance(head, DFlashHead), f"{type(head).__name__} is of no known kind"
    read, step = (BlockStep(head, reads=reads).eval() for reads in (True, False))
    return BlockRun(head, ends, target.head_model(read, step))
