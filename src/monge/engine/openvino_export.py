"""A network's step over tree nodes as an OpenVINO graph: what the `openvino` backend runs."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental import _config
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from monge.engine.grouped_attention import attend_in_groups
from monge.engine.network_facts import cache_keyword
from monge.engine.step import StepSpec

_tracing: Any = _config  # its `patch` is installed at run time, out of sight of type checkers


class Graph(torch.nn.Module):
    """The forward of a network over nodes, with the cache, and its own weights, as inputs.

    Args:
        network: The network; it is left as it is.
        spec: Shape of the inputs.
    """

    def __init__(self, network: PreTrainedModel, spec: StepSpec) -> None:
        super().__init__()
        shared = [*network.parameters(), *network.buffers()]
        self._network = copy.deepcopy(network, {id(tensor): tensor for tensor in shared})
        config = self._network.config.get_text_config()
        if str(config._attn_implementation) == "sdpa":
            attend_in_groups(self._network)
        if self._network._can_set_experts_implementation():
            self._network.set_experts_implementation("batched_mm")  # the host's other ways have no conversion
        self._kinds, self._layers, self._cache_keyword = spec.kinds, spec.layers, cache_keyword(network)
        self._names = tuple(weights(network))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        masks: Sequence[Tensor],
        kept: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Logits of every node; its hidden states; then, for every shape of keys and values, the new ones.

        New ones are `[tensors, batch, heads, nodes, size]`.

        Args:
            token_ids: Tokens, `[batch, nodes]`.
            positions: Their positions.
            masks: For every kind of layer, 0 where a node sees a column and very negative where it does not,
                `[batch, 1, nodes, past + nodes]`.
            kept: Past keys and values of every layer, `[batch, heads, past, size]`.
            values: The weights, as `weights` lists them.
        """
        layers = [_PastLayer(keys, vals, masks[0].shape[-1]) for keys, vals in zip(kept[::2], kept[1::2], strict=True)]
        inputs = {
            "input_ids": token_ids,
            "position_ids": positions,
            "attention_mask": masks[0] if len(masks) == 1 else dict(zip(self._kinds, masks, strict=True)),
            self._cache_keyword: Cache(layers=list(layers)),
            "use_cache": True,
            "output_hidden_states": bool(self._layers),
        }
        named = dict(zip(self._names, values, strict=True))
        output = torch.func.functional_call(self._network, named, (), inputs)
        new: dict[tuple[int, int], list[Tensor]] = {}
        for layer in layers:
            for tensor in layer.new():
                new.setdefault((int(tensor.shape[1]), int(tensor.shape[3])), []).append(tensor)
        states = (output.hidden_states[layer] for layer in self._layers)
        return output.logits, *states, *(torch.stack(tensors) for tensors in new.values())


def weights(network: torch.nn.Module) -> Mapping[str, Tensor]:
    """Weights by name; shared ones once."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named


def export_graph(network: PreTrainedModel, spec: StepSpec) -> Any:
    """The graph as an `openvino.Model` without weights: rows, nodes and past stay variable, weights are its last inputs."""
    import openvino

    batch, nodes, past = 2, 3, 16  # all different, so that no two of them are taken for one
    ids = torch.zeros(batch, nodes, dtype=torch.int64)
    masks = [torch.zeros(batch, 1, nodes, past + nodes) for _ in spec.kinds]
    kept = [torch.zeros(batch, heads, past, size) for heads, size in spec.cache_shapes]
    named = weights(network)
    varies = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = (
        varies,
        varies,
        [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC} for _ in masks],
        [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in kept],
        [None for _ in named],
    )
    # Size-oblivious: otherwise a size of one would be a graph of its own.
    with torch.no_grad(), _tracing.patch(backed_size_oblivious=True):
        arguments = (ids, ids.clone(), masks, kept, list(named.values()))
        program = torch.export.export(Graph(network, spec).eval(), arguments, dynamic_shapes=shapes, strict=False)
        model = openvino.convert_model(program)
    count = 2 + len(masks) + len(kept) + len(named)
    if len(model.inputs) != count:
        raise ValueError(f"the converted graph has {len(model.inputs)} inputs, not {count}")
    return model


class _PastLayer(CacheLayerMixin):
    """One layer's past keys and values during a trace, and the new ones."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, width: Any) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._width = width
        self._new: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("the cache is made before the trace")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self._new = (key_states, value_states)
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)

    def new(self) -> tuple[Tensor, ...]:
        """Keys and values of the nodes."""
        return self._new

    def get_mask_sizes(self, query_length: int) -> Any:
        return self._width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
