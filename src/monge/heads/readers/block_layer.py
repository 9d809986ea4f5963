"""A layer of a block drafter: the block attends to the target's states and to itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.readers.attention import GroupedAttention, Shape
from monge.heads.readers.decoder import feed_forward
from monge.heads.readers.layers import Nodes, Norm, Projection
from monge.heads.readers.reading import Segment
from monge.heads.readers.rotary import Rotary
from monge.heads.readers.tensors import Settings, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The attention mask of a layer.

    Args:
        window: Size in tokens; `None` for full attention.
        is_causal: Whether a row attends only to earlier rows.
        from_anchor: Whether the window is counted from the anchor for all rows and left open within
            the block, as `speculators` does, instead of from each row in both directions.
    """

    window: int | None = None
    is_causal: bool = False
    from_anchor: bool = False

    def visible(self, segment: Segment) -> Bool[Tensor, "rows seq"]:
        """The mask over context and block, for every row of a block."""
        rows, columns = segment.positions[:, None], segment.columns[None]
        in_block = columns >= rows[0]
        seen = columns <= rows if self.is_causal else torch.ones_like(columns <= rows)
        if self.window is None:
            return seen
        if self.from_anchor:
            return seen & (in_block | (columns >= rows[0] - self.window))
        return seen & (rows - columns < self.window) & (columns - rows < self.window)


class DynamicConv(nn.Module):
    """Convolution over the rows of a block, with kernels computed from each row, before and after a sub-layer.

    Args:
        tensors: `base_kernel` and `kernel_projection.weight`.
        name: Prefix of their tensor names.
        hidden: Width of a row.
        settings: `conv_kernel_size`, `conv_group_size`.

    Reference:
        DFlash 2, weights published by z-lab; read from its reference code.
    """

    base: Tensor

    def __init__(self, tensors: Tensors, name: str, hidden: int, settings: Settings) -> None:
        super().__init__()
        self.taps, self.group = (
            settings.number("conv_kernel_size"),
            settings.number("conv_group_size"),
        )
        if self.group < 1 or hidden % self.group:
            raise settings.refuse(
                f"conv_group_size {self.group} does not divide the hidden size {hidden}"
            )
        self.register_buffer("base", tensors.take(f"{name}.base_kernel", 2, self.taps, hidden))
        rows = 2 * self.taps * hidden // self.group
        self.kernels = Projection(tensors, f"{name}.kernel_projection", rows, hidden)

    def before(self, values: Float[Tensor, "texts rows hidden"]) -> tuple[Tensor, Tensor]:
        """The sub-layer's input, and the kernels for its output."""
        own = self.kernels(values).unflatten(-1, (2, self.taps, -1))
        return self._convolved(values, own[..., 0, :, :], self.base[0]), own[..., 1, :, :]

    def after(
        self, values: Float[Tensor, "texts rows hidden"], kernels: Tensor
    ) -> Float[Tensor, "texts rows hidden"]:
        """The sub-layer's output after the convolution."""
        return self._convolved(values, kernels, self.base[1])

    def _convolved(self, values: Tensor, own: Tensor, base: Tensor) -> Tensor:
        total = torch.zeros_like(values)
        for tap in range(self.taps):
            moved = functional.pad(values[:, : values.shape[1] - tap], (0, 0, tap, 0))
            total = (
                total + (base[tap] + own[..., tap, :].repeat_interleave(self.group, dim=-1)) * moved
            )
        return total


class BlockLayer(nn.Module):
    """Attention from a block to context and block, and a feed-forward network.

    The same projections make the keys and values of the context, from the target's fused states, and
    those of the block.

    Args:
        tensors: Tensors of the checkpoint.
        name: Prefix of its tensor names.
        settings: The head's configuration.
        sight: The attention mask.
    """

    def __init__(self, tensors: Tensors, name: str, settings: Settings, sight: Sight) -> None:
        super().__init__()
        shape = Shape.of(settings)
        rotary = Rotary(settings.config, shape.head_dim, settings.where)
        self.first, self.second = (
            Norm(tensors, f"{name}.{part}_layernorm", shape.hidden, shape.eps)
            for part in ("input", "post_attention")
        )
        self.attention = GroupedAttention(tensors, f"{name}.self_attn", shape, rotary)
        self.mlp = feed_forward(tensors, f"{name}.mlp", settings)
        self.sight = sight
        self.convs = nn.ModuleList(
            DynamicConv(tensors, f"{name}.{part}_conv", shape.hidden, settings)
            for part in ("attention", "mlp")
            if f"{name}.{part}_conv.base_kernel" in tensors
        )

    def read(self, states: Nodes, segments: Sequence[Segment], layer: int) -> None:
        """Append the context's keys and values to the cache."""
        keys, values = self.attention.keys_values(states)
        angles = self.attention.rotary.angles(
            torch.cat([segment.positions for segment in segments]), states
        )
        counts = [len(segment.positions) for segment in segments]
        parts = (self.attention.rotary.turn(keys, angles).split(counts), values.split(counts))
        for segment, own_keys, own_values in zip(segments, *parts, strict=True):
            segment.layers[layer].append(own_keys, own_values)

    def forward(
        self, values: Float[Tensor, "texts rows hidden"], segments: Sequence[Segment], layer: int
    ) -> Tensor:
        values = values + self._around(
            0, self.first(values), lambda inner: self._attend(inner, segments, layer)
        )
        return values + self._around(
            1, self.second(values), lambda inner: self.mlp(inner.flatten(0, 1)).view_as(inner)
        )

    def _around(self, place: int, values: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.convs:
            return part(values)
        conv = self.convs[place]
        assert isinstance(conv, DynamicConv)
        before, kernels = conv.before(values)
        return conv.after(part(before), kernels)

    def _attend(self, values: Tensor, segments: Sequence[Segment], layer: int) -> Tensor:
        mixed = self.attention(values.flatten(0, 1), segments, layer, visible=self.sight.visible)
        return mixed.view_as(values)
