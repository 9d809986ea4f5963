"""A network's step over tree nodes, as a module of tensors: what the compiled backend traces, or records."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from monge.engine.compiled_layout import lay_out
from monge.engine.grouped_attention import attend_in_groups
from monge.engine.network_facts import cache_keyword, chooses_logits
from monge.engine.step import StepSpec

Size = int | torch.SymInt


class Step(torch.nn.Module):
    """The forward of a network over nodes, with everything that varies between forwards as an input.

    A copy of the network's modules that shares its tensors. On the CPU all but the weights of linear maps, tied ones too: those
    of float32 lie in panels, those of float64 transposed, so that a product with a few rows streams through them.

    Args:
        network: The network; it is left as it is.
        spec: Shape of the inputs.
    """

    def __init__(self, network: PreTrainedModel, spec: StepSpec) -> None:
        super().__init__()
        self._network = _skeleton(network)
        self._kinds, self._layers = spec.kinds, spec.layers
        self._cache_keyword, self._chooses = cache_keyword(network), chooses_logits(network)

    def forward(
        self, token_ids: Tensor, places: tuple[Tensor, Tensor, Tensor], masks: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits of the nodes that are asked for, then hidden states of all; keys and values are written into `kept`.

        Args:
            token_ids: Tokens, `[batch, nodes]`.
            places: Their positions; where in the cache their keys go; and, the same for all rows, which nodes have logits: all
                have where the network does not let them be chosen.
            masks: For every kind of layer which columns a node sees, `[batch, 1, nodes, seq]`.
            kept: Keys and values of every layer, `[batch, heads, capacity, head_dim]`, changed in place.
        """
        positions, columns, shown = places
        rows = torch.arange(token_ids.shape[0], device=token_ids.device)[:, None]
        width = masks[0].shape[-1]
        layers = [_KeptLayer(keys, values, rows, columns, width) for keys, values in zip(kept[::2], kept[1::2], strict=True)]
        varying = {self._cache_keyword: Cache(layers=list(layers)), **({"logits_to_keep": shown} if self._chooses else {})}
        output = self._network(
            **varying,
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=masks[0] if len(masks) == 1 else dict(zip(self._kinds, masks, strict=True)),
            use_cache=True,
            output_hidden_states=bool(self._layers),
        )
        return output.logits, *(output.hidden_states[layer] for layer in self._layers)

    def tensors(self) -> Mapping[str, Tensor]:
        """Weights and buffers by name."""
        parameters = self.named_parameters(remove_duplicate=False)
        return dict(parameters) | dict(self.named_buffers(remove_duplicate=False))


class _KeptLayer(CacheLayerMixin):
    """One layer's keys and values during a trace."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: Size) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._rows, self._columns, self._width = rows, columns, width

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a step is given its cache: the host asks only layers that say they have none yet")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys[self._rows, :, self._columns] = key_states.transpose(1, 2)
        self.values[self._rows, :, self._columns] = value_states.transpose(1, 2)
        return self.keys[:, :, : self._width], self.values[:, :, : self._width]

    def get_mask_sizes(self, query_length: Size) -> Any:
        return self._width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _skeleton(network: PreTrainedModel) -> PreTrainedModel:
    shared = [*network.parameters(), *network.buffers()]
    twin = copy.deepcopy(network, {id(tensor): tensor for tensor in shared})
    if network.device.type == "cpu":
        lay_out(twin)
    config = twin.config.get_text_config()
    if str(config._attn_implementation) == "sdpa" and _shares_heads(config):
        attend_in_groups(twin)
    return twin


def _shares_heads(config: Any) -> bool:
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "num_key_value_heads", heads) != heads
