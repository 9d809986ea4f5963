"""Medusa heads: `medusa_lm_head.pt` or `.safetensors`."""

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from jaxtyping import Float
from torch import Tensor, nn

from monge.core.errors import ModelLoadError
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import Nodes, Projection, ResBlocks
from monge.heads.readers.source import Source

_KEY: Final = re.compile(r"^(medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")


class MedusaHead(PublishedHead):
    """Residual blocks and an output layer per future token, all on the target's last state.

    With h_t the state after token x_t, head i (from 0) gives the law of x_{t+2+i}: the target
    itself gives x_{t+1}.

    Args:
        source: `{head}.{block}.linear.{weight,bias}` and `{head}.{number of blocks}.weight`.
        num_blocks: Number of residual blocks per head.

    Reference:
        Cai et al., arXiv 2401.10774. Their typical acceptance is not lossless and is not
        used.
    """

    family: ClassVar[str] = "medusa"

    def __init__(self, source: Source, num_blocks: Sequence[int]) -> None:
        vocab, hidden = source.shape(f"0.{num_blocks[0]}.weight")
        super().__init__(hidden, vocab)
        self.blocks = nn.ModuleList(
            ResBlocks(source, [f"{head}.{block}" for block in range(count)], hidden)
            for head, count in enumerate(num_blocks)
        )
        self.outputs = nn.ModuleList(
            Projection(source, f"{head}.{count}", vocab, hidden)
            for head, count in enumerate(num_blocks)
        )

    @property
    def max_depth(self) -> int:
        return len(self.outputs)

    def step(self, index: int, values: Nodes) -> Float[Tensor, "nodes vocab"]:
        """Return the logits of head `index` after these last states."""
        return self.outputs[index](self.blocks[index](values))


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether this is a Medusa head, judged by its tensors."""
    return any((match := _KEY.match(name)) and match[4] for name in checkpoint.shapes)


def read(checkpoint: Checkpoint) -> MedusaHead:
    """Read one. Heads and blocks are counted, because published configurations are often wrong."""
    where, matches = repr(str(checkpoint.path)), dict[str, re.Match[str]]()
    for name in checkpoint.shapes:
        if match := _KEY.match(name):
            matches[name] = match
    prefixes = {match[1] or "" for match in matches.values()}
    others = [name for name in checkpoint.shapes if name not in matches]
    if len(prefixes) > 1 or (prefixes == {""} and others):
        raise ModelLoadError(
            f"{where}: tensors beside the Medusa heads: {sorted(others or prefixes)[:4]}"
        )
    heads = sorted({int(match[2]) for match in matches.values()})
    if heads != list(range(len(heads))):
        raise ModelLoadError(
            f"{where}: Medusa heads {heads}; expected 0 to {len(heads) - 1} without gaps"
        )
    blocks = {(int(match[2]), match[3]) for match in matches.values() if match[4]}
    counts = [sum(head == number for head, _ in blocks) for number in heads]
    # Heads that were trained together with their target come in one file with it; a prefix tells
    # them apart.
    names = {name.removeprefix(match[1] or ""): name for name, match in matches.items()}
    source = Source.of(checkpoint, names)
    head = MedusaHead(source, counts)
    source.finish()
    return head
