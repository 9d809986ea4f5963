"""The part of a model around a `transformers` network that is the same for trees and chains."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from monge.core.model import SequenceModel
from monge.engine.models.forward_program import SourceWeights
from monge.engine.models.layer_subset import layer_subset
from monge.engine.models.network_facts import (
    cache_keyword,
    check_causal,
    chooses_logits,
    context_length,
)


class HfModel:
    """A causal language model in evaluation mode; a `LayeredModel` once it reads tokens.

    Attributes:
        source: Checked whenever texts are opened.
        subsets: Models of some of its layers.

    Raises:
        UnsupportedModelError: If it is not causal, or takes no cache.
    """

    source: SourceWeights | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        check_causal(model)
        config = model.config.get_text_config()
        self.network = model
        self.dtype: torch.dtype = model.dtype
        self.num_layers, self.vocab_size = int(config.num_hidden_layers), int(config.vocab_size)
        self.max_length = context_length(config)
        self._device = model.device
        self._cache_keyword, self._chooses_logits = cache_keyword(model), chooses_logits(model)
        self._forward_s = 0.0
        self.subsets: list[SequenceModel] = []

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward."""
        return self._forward_s + sum(model.forward_s for model in self.subsets)

    def layer_subset(self, layers: Sequence[int]) -> SequenceModel:
        """See `LayeredModel`."""
        model: Any = type(self)(layer_subset(self.network, layers))
        self.subsets.append(model)
        return model
