"""Attention over a batch of texts."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.readers.layers import Nodes, Norm, Projection
from monge.heads.readers.rotary import Rotary, yarn_stretch
from monge.heads.readers.slots import CacheSlots
from monge.heads.readers.source import Source


class CacheAttention(nn.Module):
    """Attention of `[batch, heads, nodes, dim]` queries to the columns of a cache that a mask shows.

    Returns `[batch, nodes, heads, dim]`. A backend may replace it.

    Args:
        scale: Factor of the scores; `None` for 1 over the square root of the width of a key.
    """

    is_cache_attention: ClassVar = True

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        width = mask.shape[-1]
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys[:, :, :width],
            values[:, :, :width],
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return mixed.transpose(1, 2)


class GroupedAttention(nn.Module):
    """Grouped-query attention, with query and key norms and an output gate if the checkpoint has them.

    Args:
        doubled: Whether the input is twice as wide as the output: embedding and state.
        window: Size of the sliding window in tokens; `None` for full attention.
        centred: Whether norm weights are stored minus 1.

    Raises:
        ModelLoadError: If a size is missing, or the query heads are not a multiple of the key heads.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        *,
        doubled: bool = False,
        window: int | None = None,
        centred: bool = False,
    ) -> None:
        super().__init__()
        hidden, heads = source.hidden, source.number("num_attention_heads")
        kv_heads = source.number("num_key_value_heads", default=heads)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise source.refuse(f"{heads} query heads cannot share {kv_heads} key heads")
        dim = source.number("head_dim", default=hidden // heads)
        read, width, rows = (2 * hidden if doubled else hidden), heads * dim, kv_heads * dim
        # A gate is stored behind the queries, head by head.
        self.is_gated = source.shape(f"{name}.q_proj.weight")[0] == 2 * width
        num_queries = 2 * width if self.is_gated else width
        self.q_proj = Projection(source, f"{name}.q_proj", num_queries, read)
        self.k_proj = Projection(source, f"{name}.k_proj", rows, read)
        self.v_proj = Projection(source, f"{name}.v_proj", rows, read)
        self.o_proj = Projection(source, f"{name}.o_proj", hidden, width)
        has_norms = f"{name}.q_norm.weight" in source
        self.q_norm, self.k_norm = (
            Norm(source, f"{name}.{part}_norm", dim, centred=centred)
            if has_norms
            else nn.Identity()
            for part in ("q", "k")
        )
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, dim
        self.rotary, self.window = Rotary(source.config, dim, source.where), window
        self.cache_shapes = ((kv_heads, dim),) * 2
        self.attend = CacheAttention()

    def keys_values(self, values: Nodes) -> tuple[Tensor, Tensor]:
        """Return keys before their rotation, and values, `[nodes, heads, dim]`."""
        parts = (part(values) for part in (self.k_proj, self.v_proj))
        keys, value_states = (part.unflatten(-1, (self.kv_heads, -1)) for part in parts)
        return self.k_norm(keys), value_states

    def turned(
        self, values: Nodes, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, `[nodes, heads, dim]`, the first two rotated, and the gate."""
        queries, gate = self.q_proj(values).unflatten(-1, (self.heads, -1)), None
        if self.is_gated:
            queries, gate = queries.chunk(2, dim=-1)
            gate = gate.flatten(1)
        keys, value_states = self.keys_values(values)
        turned = self.rotary.turn(torch.cat([self.q_norm(queries), keys], dim=1), angles)
        queries, keys = turned.split([self.heads, self.kv_heads], dim=1)
        return queries, keys, value_states, gate

    def forward(
        self, values: Nodes, slots: CacheSlots, layer: int, mask: Tensor | None = None
    ) -> Nodes:
        """Attend, and keep keys and values in the cache.

        Args:
            values: Inputs of all nodes.
            slots: The nodes.
            layer: Index of the layer's KV cache.
            mask: Columns that they see; `None` for those of the layer's window.
        """
        angles = self.rotary.angles(slots.positions.flatten(), values)
        queries, *keys_values, gate = self.turned(values, angles)
        mask = slots.masks[self.window] if mask is None else mask
        queries = queries.unflatten(0, slots.positions.shape).transpose(1, 2)
        mixed = self.attend(queries, *slots.write(layer, *keys_values), mask)
        mixed = mixed.flatten(2).flatten(0, 1)
        return self.o_proj(mixed if gate is None else mixed * torch.sigmoid(gate))


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are projected from a compressed vector.

    Reference:
        DeepSeek-V2, arXiv 2405.04434; used by DeepSeek-V3, arXiv 2412.19437.
    """

    window: ClassVar[None] = None

    def __init__(self, source: Source, name: str) -> None:
        super().__init__()
        hidden, heads = source.hidden, source.number("num_attention_heads")
        self.rope, self.plain, self.value = (
            source.number(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        rank, latent = source.number("q_lora_rank", default=0), source.number("kv_lora_rank")
        width, both = self.plain + self.rope, self.plain + self.value
        self.heads, self.latent = heads, latent
        self.q_down = self.q_norm = nn.Identity()
        if rank:
            self.q_down = Projection(source, f"{name}.q_a_proj", rank, hidden)
            self.q_norm = Norm(source, f"{name}.q_a_layernorm", rank, 1e-6)
        up = f"{name}.q_b_proj" if rank else f"{name}.q_proj"
        self.q_up = Projection(source, up, heads * width, rank or hidden)
        self.kv_down = Projection(source, f"{name}.kv_a_proj_with_mqa", latent + self.rope, hidden)
        self.kv_norm = Norm(source, f"{name}.kv_a_layernorm", latent, 1e-6)
        self.kv_up = Projection(source, f"{name}.kv_b_proj", heads * both, latent)
        self.o_proj = Projection(source, f"{name}.o_proj", hidden, heads * self.value)
        interleaved = source.flag("rope_interleave", default=True)
        # `qk_rope_head_dim` is the rotated width itself, so no further share of it is taken.
        config = {**source.config, "partial_rotary_factor": None}
        self.rotary = Rotary(config, self.rope, source.where, interleaved=interleaved)
        self.attend = CacheAttention(width**-0.5 * yarn_stretch(source.config) ** 2)
        self.cache_shapes = (heads, width), (heads, self.value)

    def forward(self, values: Nodes, slots: CacheSlots, layer: int) -> Nodes:
        queries = self.q_up(self.q_norm(self.q_down(values))).unflatten(-1, (self.heads, -1))
        latent, turning = self.kv_down(values).split([self.latent, self.rope], dim=-1)
        pairs = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1))
        plain, value_states = pairs.split([self.plain, self.value], dim=-1)
        angles = self.rotary.angles(slots.positions.flatten(), values)
        turned = self.rotary.turn(turning[:, None], angles).expand(-1, self.heads, -1)
        keys = torch.cat([plain, turned], dim=-1)
        still, turning = queries.split([self.plain, self.rope], dim=-1)
        queries = torch.cat([still, self.rotary.turn(turning, angles)], dim=-1)
        queries = queries.unflatten(0, slots.positions.shape).transpose(1, 2)
        kept = slots.write(layer, keys, value_states)
        mixed = self.attend(queries, *kept, slots.masks[self.window])
        return self.o_proj(mixed.flatten(2).flatten(0, 1))
