"""A network's forward as a traceable module, compiled on the CPU and captured on the GPU."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from monge.networks.forward import (
    FastForward,
    ForwardOutput,
    ForwardSpec,
    NetworkForward,
)
from monge.networks.network_facts import cache_keyword, chooses_logits
from monge.networks.tree_cache import TreeCache

_GROUPED_ATTENTION: Final = "monge_shared_heads"
_PRODUCT_ATTENTION: Final = "monge_products"
_FEW_QUERIES: Final = 4096
"""Queries of all heads and rows for which scores are written out; more are left to `sdpa`."""
_tracing: Any = _config  # its `patch` is installed at run time, out of sight of type checkers

Size = int | torch.SymInt


class TracedForward(torch.nn.Module):
    """The forward of a network over nodes, with everything that varies between forwards as an input.

    A copy of the network's modules that shares its tensors.

    Args:
        eager: The network, which is left as it is, and the hidden states that it gives.
        spec: Shapes and types of its inputs.
        adapt: Changes the copy for a device; heads that share keys are grouped by default.
    """

    def __init__(
        self,
        eager: NetworkForward,
        spec: ForwardSpec,
        adapt: Callable[[PreTrainedModel], None] | None = None,
    ) -> None:
        super().__init__()
        network = eager.network
        shared = [*network.parameters(), *network.buffers()]
        self._network = copy.deepcopy(network, {id(tensor): tensor for tensor in shared})
        # One that was put into the network would run it in place of the copy.
        vars(self._network).pop("forward", None)
        (group_shared_heads if adapt is None else adapt)(self._network)
        self._kinds, self._layers = spec.kinds, eager.layers
        self._cache_keyword, self._chooses = cache_keyword(network), chooses_logits(network)

    @property
    def network(self) -> PreTrainedModel:
        """The copy."""
        return self._network

    def forward(
        self,
        token_ids: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        masks: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return logits of the chosen nodes, then hidden states of all; keys and values are written into `kept`.

        Args:
            token_ids: Tokens, `[batch, nodes]`.
            places: Their positions; the cache columns of their keys; and, the same for all rows, the
                nodes that get logits: all, if the network does not let them be chosen.
            masks: Visible columns of every node, for every kind of layer, `[batch, 1, nodes, seq]`.
            kept: Keys and values of every layer, `[batch, heads, capacity, head_dim]`, changed in
                place.
        """
        positions, columns, shown = places
        rows = torch.arange(token_ids.shape[0], device=token_ids.device)[:, None]
        width = masks[0].shape[-1]
        layers = [
            CacheLayer(keys, values, rows, columns, width)
            for keys, values in zip(kept[::2], kept[1::2], strict=True)
        ]
        varying: dict[str, Any] = {self._cache_keyword: Cache(layers=list(layers))}
        if self._chooses:
            varying["logits_to_keep"] = shown
        by_kind = dict(zip(self._kinds, masks, strict=True))
        output = self._network(
            **varying,
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=masks[0] if len(masks) == 1 else by_kind,
            use_cache=True,
            output_hidden_states=bool(self._layers),
        )
        return output.logits, *(output.hidden_states[layer] for layer in self._layers)


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a module by name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(remove_duplicate=False))


class UncompiledForward(FastForward):
    """A traced forward that runs as it is."""

    name = "uncompiled"

    def __init__(self, eager: NetworkForward, spec: ForwardSpec, module: TracedForward) -> None:
        super().__init__(eager, spec)
        self.module = module

    def read(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput:
        places = positions, cache.columns(token_ids.shape[1]), all_nodes(token_ids)
        logits, *states = self.module(token_ids, places, masks, cache.kept())
        return ForwardOutput(logits=logits, states=tuple(states))


def all_nodes(token_ids: Tensor) -> Tensor:
    """Indices of all nodes of `[batch, nodes]` tokens, which have logits then."""
    return torch.arange(token_ids.shape[1], device=token_ids.device)


class CacheLayer(CacheLayerMixin):
    """Keys and values of a layer during a trace.

    Args:
        keys: `[batch, heads, capacity, head_dim]`, written in place.
        values: The same.
        rows: Rows that are written, `[batch, 1]`.
        columns: Columns that are written, `[batch, nodes]`.
        width: Columns that are read; `None` for all.
    """

    is_sliding = False

    def __init__(
        self, keys: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: Size | None
    ) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.rows, self.columns, self._width = rows, columns, width

    def alone(self) -> Cache:
        """Return a cache of this layer alone, all of whose columns are read."""
        assert self.keys is not None and self.values is not None
        return Cache(layers=[CacheLayer(self.keys, self.values, self.rows, self.columns, None)])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError(
            "a step is given its cache: the host asks only layers that say they have none yet"
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys[self.rows, :, self.columns] = key_states.transpose(1, 2)
        self.values[self.rows, :, self.columns] = value_states.transpose(1, 2)
        if self._width is None:
            return self.keys, self.values
        return self.keys[:, :, : self._width], self.values[:, :, : self._width]

    def get_mask_sizes(self, query_length: Size) -> Any:
        return self._width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def runs_sdpa(network: PreTrainedModel) -> bool:
    """Return whether a network's attention is `sdpa`."""
    return str(network.config.get_text_config()._attn_implementation) == "sdpa"


def export_forward(step: TracedForward, spec: ForwardSpec) -> ExportedProgram:
    """Trace a step; batch, nodes, their logits, visible columns and capacity stay variable."""
    # All different, so that no two of them are taken for one.
    batch, nodes, logits, width, capacity = 2, 3, 5, 11, 16
    ids = torch.zeros(batch, nodes, dtype=torch.int64)
    columns = torch.arange(nodes).repeat(batch, 1)
    shown = torch.arange(logits) % nodes
    masks = [torch.ones(batch, 1, nodes, width).to(spec.mask_dtype) for _ in spec.kinds]
    kept = [
        torch.zeros(batch, heads, capacity, size, dtype=spec.dtype)
        for heads, size in spec.cache_shapes
    ]
    varies = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = (
        varies,
        (varies, varies, {0: Dim.DYNAMIC}),
        [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC} for _ in masks],
        [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in kept],
    )
    return export_module(step, (ids, (columns, columns.clone(), shown), masks, kept), shapes)


def export_module(
    module: torch.nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...]
) -> ExportedProgram:
    """Trace a module."""
    # Size-oblivious: otherwise a size of one would be compiled by itself.
    with torch.no_grad(), _tracing.patch(backed_size_oblivious=True):
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


def attend_with(
    network: PreTrainedModel,
    name: str,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor],
) -> None:
    """Make a network attend by a function.

    Args:
        network: The network.
        name: The name of the function, for `transformers`.
        attend: Returns `[batch, nodes, heads, head_dim]` of queries, keys, values, mask and scale.
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        *,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, attention_mask, scale), None

    AttentionInterface.register(name, forward)
    network.set_attn_implementation(name)


def group_shared_heads(network: PreTrainedModel) -> None:
    """Make `sdpa` attention of a network attend without copies of the keys that heads share."""
    config = network.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if runs_sdpa(network) and getattr(config, "num_key_value_heads", heads) != heads:
        attend_with(network, _GROUPED_ATTENTION, _grouped_attention)


def _grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """The CPU's `sdpa`, where heads that share keys are further queries of the same head.

    The few queries are scaled here: a backend that takes attention apart would scale all keys.
    """
    queries, mask = _by_shared_head(query * scale, key, mask)
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries, key, value, attn_mask=mask, scale=1.0
    )
    return _by_head(attended, query)


def attend_by_products(network: PreTrainedModel) -> None:
    """Make `sdpa` attention of a network attend by two batched products, which a compiler fuses with what is around them."""
    if runs_sdpa(network):
        attend_with(network, _PRODUCT_ATTENTION, _product_attention)


def _product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """`_grouped_attention` with its scores written out, and a softmax in at least float32."""
    batch, heads, nodes, _ = query.shape
    if batch * heads * nodes > _FEW_QUERIES:
        return _grouped_attention(query, key, value, mask, scale)
    queries, mask = _by_shared_head(query * scale, key, mask)
    scores = queries @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    is_shown = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, float("-inf")) if is_shown else scores + mask
    return _by_head(torch.softmax(scores, dim=-1).to(value.dtype) @ value, query)


def _by_shared_head(queries: Tensor, key: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and mask, with those of all heads that share keys below each other."""
    batch, heads, nodes, size = queries.shape
    shared = key.shape[1]
    grouped = queries.reshape(batch, shared, heads // shared * nodes, size)
    return grouped, mask.repeat(1, 1, heads // shared, 1)


def _by_head(attended: Tensor, query: Tensor) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return attended.reshape(batch, heads, nodes, attended.shape[-1]).transpose(1, 2).contiguous()
