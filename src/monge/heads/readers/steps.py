"""Steps of heads over nodes of several texts, as a backend runs them."""

from collections.abc import Sequence

from torch import Tensor, nn

from monge.heads.readers.base import ChainHead, PublishedHead, Unembed
from monge.heads.readers.block import DFlashHead
from monge.heads.readers.slots import CacheSlots
from monge.networks.base import CachedStep

Places = tuple[Tensor, Tensor, Tensor]


class _Step(CachedStep):
    def __init__(self, head: PublishedHead, width: int) -> None:
        super().__init__()
        self.width, self.is_traceable = width, head.is_traceable
        self.embedding = None
        if head.embedding is not None:
            self.embedding = nn.Embedding.from_pretrained(head.embedding)
        attentions = head.attentions
        self.cache_shapes = tuple(shape for part in attentions for shape in part.cache_shapes)
        self.windows = tuple(dict.fromkeys(part.window for part in attentions))

    def slots(self, places: Places, masks: Sequence[Tensor], kept: Sequence[Tensor]) -> CacheSlots:
        """The slots of the nodes in the cache."""
        by_window = dict(zip(self.windows, masks, strict=True))
        return CacheSlots(places[0], places[1], by_window, kept)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Embeddings of all tokens, `[batch * nodes, hidden]`."""
        assert self.embedding is not None, "the backend sets it"
        return self.embedding(token_ids.flatten())


class ChainStep(_Step):
    """A step of a `ChainHead`.

    Args:
        head: The head.
        unembed: Maps last states to the target's logits.
        fuses: Whether states are those of the target, which are fused first.
    """

    def __init__(self, head: ChainHead, unembed: Unembed, *, fuses: bool) -> None:
        super().__init__(head, head.fused_width if fuses else head.width)
        self.head, self.fuses = head, fuses
        # Compiled code holds a copy of the step, and does not need the target.
        self.unembed = _own_output if head.is_traceable else unembed

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        places: Places,
        masks: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        states = states.flatten(0, 1)
        if self.fuses:
            states = self.head.fuse(states)
        slots = self.slots(places, masks, kept)
        states = self.head.advance(self.embedded(token_ids), states, slots)
        logits = self.head.logits(states[places[2]], self.unembed)
        return states.unflatten(0, token_ids.shape), logits


class BlockStep(_Step):
    """A step of a `DFlashHead` without logits: reads the context, or predicts the rows of a block.

    Args:
        head: The head.
        reads: Whether it reads the context.
    """

    def __init__(self, head: DFlashHead, *, reads: bool) -> None:
        super().__init__(head, head.fc.weight.shape[1] if reads else 0)
        self.head, self.reads = head, reads

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        places: Places,
        masks: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        slots = self.slots(places, masks, kept)
        if self.reads:
            self.head.read(states.flatten(0, 1), slots)
            rows = states[..., :0]
        else:
            embeddings = self.embedded(token_ids).unflatten(0, token_ids.shape)
            rows = self.head.predict(embeddings, slots)
        return rows, rows.flatten(0, 1)[places[2], :0]


def _own_output(states: Tensor) -> Tensor:
    raise AssertionError("this head has an output layer of its own")
