"""Attention over a batch of texts: projections of all nodes at once, scores text by text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.readers.layers import Nodes, Norm, Projection
from monge.heads.readers.reading import KeyValues, Segment
from monge.heads.readers.rotary import Rotary, parameters_of, yarn_scale
from monge.heads.readers.tensors import Settings, Tensors

Mask = Callable[[Segment], Bool[Tensor, "nodes seq"]]
"""Maps a text's new nodes to the columns of its cache that each of them attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of an attention.

    Args:
        hidden: Width of the output.
        input: Width of the input: twice the hidden size if embedding and state are concatenated.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        eps: Epsilon of the norms.
    """

    hidden: int
    input: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, settings: Settings, *, doubled: bool = False) -> "Shape":
        """Read the sizes from a configuration.

        Raises:
            ModelLoadError: If one is missing, or the query heads are not a multiple of the key heads.
        """
        hidden, heads = settings.number("hidden_size"), settings.number("num_attention_heads")
        kv_heads = settings.number("num_key_value_heads", default=heads)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise settings.refuse(f"{heads} query heads cannot share {kv_heads} key heads")
        return cls(
            hidden=hidden,
            input=2 * hidden if doubled else hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=settings.number("head_dim", default=hidden // heads),
            eps=settings.real("rms_norm_eps", 1e-6),
        )


class GroupedAttention(nn.Module):
    """Grouped-query attention, with query and key norms and an output gate if the checkpoint has them.

    Args:
        tensors: Tensors of the checkpoint.
        name: Prefix of its tensor names.
        shape: Its sizes.
        rotary: Rotary position embedding.
        window: Size of the sliding window in tokens; `None` for full attention.
        centred: Whether norm weights are stored minus 1.
    """

    def __init__(
        self,
        tensors: Tensors,
        name: str,
        shape: Shape,
        rotary: Rotary,
        *,
        window: int | None = None,
        centred: bool = False,
    ) -> None:
        super().__init__()
        dim, width = shape.head_dim, shape.heads * shape.head_dim
        # A gate is stored behind the queries, head by head.
        self.is_gated = tensors.shape(f"{name}.q_proj.weight")[0] == 2 * width
        self.q_proj = Projection(
            tensors, f"{name}.q_proj", width * (2 if self.is_gated else 1), shape.input
        )
        self.k_proj, self.v_proj = (
            Projection(tensors, f"{name}.{part}_proj", shape.kv_heads * dim, shape.input)
            for part in ("k", "v")
        )
        self.o_proj = Projection(tensors, f"{name}.o_proj", shape.hidden, width)
        has_norms = f"{name}.q_norm.weight" in tensors
        self.q_norm, self.k_norm = (
            Norm(tensors, f"{name}.{part}_norm", dim, shape.eps, centred=centred)
            if has_norms
            else None
            for part in ("q", "k")
        )
        self.shape, self.rotary, self.window = shape, rotary, window

    @property
    def kept_per_token(self) -> int:
        """Elements that the keys and values of one token take."""
        return 2 * self.shape.kv_heads * self.shape.head_dim

    def queries(self, values: Nodes) -> tuple[Tensor, Tensor | None]:
        """Return queries `[nodes, heads, dim]`, and the gate `[nodes, heads * dim]` if there is one."""
        found = self.q_proj(values).unflatten(-1, (self.shape.heads, -1))
        found, gate = found.chunk(2, dim=-1) if self.is_gated else (found, None)
        return found if self.q_norm is None else self.q_norm(
            found
        ), None if gate is None else gate.flatten(1)

    def keys_values(self, values: Nodes) -> tuple[Tensor, Tensor]:
        """Return keys before their rotation, and values, `[nodes, heads, dim]`."""
        keys, found = (
            part(values).unflatten(-1, (self.shape.kv_heads, -1))
            for part in (self.k_proj, self.v_proj)
        )
        return keys if self.k_norm is None else self.k_norm(keys), found

    def turned(
        self, values: Nodes, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, `[nodes, heads, dim]`, the first two rotated, and the gate."""
        queries, gate = self.queries(values)
        keys, found = self.keys_values(values)
        turned = self.rotary.turn(torch.cat([queries, keys], dim=1), angles)
        queries, keys = turned.split([self.shape.heads, self.shape.kv_heads], dim=1)
        return queries, keys, found, gate

    def forward(
        self,
        values: Nodes,
        segments: Sequence[Segment],
        layer: int,
        *,
        visible: Mask | None = None,
    ) -> Nodes:
        """Attend, and keep keys and values in the cache unless a mask is given.

        Args:
            values: Inputs of all nodes.
            segments: The texts of the nodes.
            layer: Index of the layer's KV cache.
            visible: The mask of nodes that are read anew in every round; `None` for the texts' own.
        """
        angles = self.rotary.angles(torch.cat([segment.positions for segment in segments]), values)
        queries, keys, found, gate = self.turned(values, angles)
        mixed = read_segments(
            queries, keys, found, segments, layer, window=self.window, visible=visible
        )
        return self.o_proj(mixed if gate is None else mixed * torch.sigmoid(gate))


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are projected from one compressed vector.

    Args:
        tensors: Tensors of the checkpoint.
        name: Prefix of its tensor names.
        settings: The head's configuration.

    Reference:
        DeepSeek-V2, arXiv 2405.04434; used by DeepSeek-V3, arXiv 2412.19437.
    """

    def __init__(self, tensors: Tensors, name: str, settings: Settings) -> None:
        super().__init__()
        hidden, heads = settings.number("hidden_size"), settings.number("num_attention_heads")
        self.rope, self.plain, self.value = (
            settings.number(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        rank, latent, width = (
            settings.number("q_lora_rank", default=0),
            settings.number("kv_lora_rank"),
            self.plain + self.rope,
        )
        self.heads, self.latent = heads, latent
        self.q_down = Projection(tensors, f"{name}.q_a_proj", rank, hidden) if rank else None
        self.q_norm = Norm(tensors, f"{name}.q_a_layernorm", rank, 1e-6) if rank else None
        self.q_up = Projection(
            tensors, f"{name}.q_b_proj" if rank else f"{name}.q_proj", heads * width, rank or hidden
        )
        self.kv_down = Projection(tensors, f"{name}.kv_a_proj_with_mqa", latent + self.rope, hidden)
        self.kv_norm = Norm(tensors, f"{name}.kv_a_layernorm", latent, 1e-6)
        self.kv_up = Projection(
            tensors, f"{name}.kv_b_proj", heads * (self.plain + self.value), latent
        )
        self.o_proj = Projection(tensors, f"{name}.o_proj", hidden, heads * self.value)
        interleaved = settings.flag("rope_interleave", default=True)
        # The share of a head that turns is named by its width here, so no further share of it is
        # taken.
        config = {**settings.config, "partial_rotary_factor": None}
        self.rotary = Rotary(config, self.rope, settings.where, interleaved=interleaved)
        self.scale = width**-0.5 * _stretch(settings.config) ** 2
        self.kept_per_token = heads * (width + self.value)

    def forward(self, values: Nodes, segments: Sequence[Segment], layer: int) -> Nodes:
        low = (
            values
            if self.q_down is None or self.q_norm is None
            else self.q_norm(self.q_down(values))
        )
        queries = self.q_up(low).unflatten(-1, (self.heads, -1))
        latent, turning = self.kv_down(values).split([self.latent, self.rope], dim=-1)
        pairs = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1))
        plain, found = pairs.split([self.plain, self.value], dim=-1)
        angles = self.rotary.angles(torch.cat([segment.positions for segment in segments]), values)
        turned = self.rotary.turn(turning[:, None], angles).expand(-1, self.heads, -1)
        keys = torch.cat([plain, turned], dim=-1)
        still, turning = queries.split([self.plain, self.rope], dim=-1)
        queries = torch.cat([still, self.rotary.turn(turning, angles)], dim=-1)
        return self.o_proj(read_segments(queries, keys, found, segments, layer, scale=self.scale))


def read_segments(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: Sequence[Segment],
    layer: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    visible: Mask | None = None,
) -> Nodes:
    """Return the attention of each text's new nodes to what it has read, `[nodes, heads * dim]`.

    With a mask of their own, the new nodes are forgotten again.
    """
    counts = [len(segment.positions) for segment in segments]
    parts: list[Tensor] = []
    for segment, *own in zip(
        segments, *(part.split(counts) for part in (queries, keys, values)), strict=True
    ):
        kept: KeyValues = segment.layers[layer]
        every_key, every_value = kept.append(own[1], own[2])
        mask = within(segment, window) if visible is None else visible(segment)
        parts.append(attend(own[0], every_key, every_value, mask, scale=scale))
        if visible is not None:
            kept.length -= len(own[1])
    return torch.cat(parts)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Bool[Tensor, "nodes seq"],
    *,
    scale: float | None,
) -> Nodes:
    """Return the attention of `[nodes, heads, dim]` to `[heads, columns, dim]`."""
    mixed = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=visible.to(queries.device),
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[0],
    )
    return mixed[0].transpose(0, 1).flatten(1)


def within(segment: Segment, window: int | None) -> Bool[Tensor, "nodes seq"]:
    """Return the part of `visible` inside the sliding window."""
    if window is None:
        return segment.visible
    return segment.visible & (segment.positions[:, None] - segment.columns[None] < window)


def _stretch(config: Mapping[str, Any]) -> float:
    rope = parameters_of(config)
    weight = rope.get("mscale_all_dim")
    is_stretched = rope.get("rope_type", "default") != "default"
    return yarn_scale(float(rope["factor"]), float(weight)) if is_stretched and weight else 1.0
