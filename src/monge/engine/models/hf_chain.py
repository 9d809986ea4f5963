"""A `transformers` network that can only read chains.

Positions from token order, or recurrent state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from monge.core.errors import MongeError, UnsupportedModelError
from monge.core.model import NodeBlock
from monge.engine.clock import now
from monge.engine.models.layer_subset import layer_subset
from monge.engine.models.network_facts import (
    cache_keyword,
    check_causal,
    chooses_logits,
    context_length,
    forward_parameters,
    own_cache,
    rollback_obstacle,
    tree_obstacle,
)
from monge.engine.session import catch

_PREFILL: Final = 1024


@dataclass(slots=True)
class _Row:
    cache: DynamicCache
    length: int = 0
    num_uncommitted: int = 0


class HfChainModel:
    """Reads chains, one sequence per forward, each with its own cache; a `LayeredModel`.

    For networks that cannot read trees: ALiBi models, whose positions are the order of the tokens,
    roll back by dropping the end of their cache; models with recurrent state cannot roll back at
    all and are decoded plainly. So are models that read one token a forward behind their cache: a
    forward of a few tokens finds out.

    Args:
        model: A causal language model in evaluation mode.

    Raises:
        UnsupportedModelError: If it is not causal, or cannot read token after token behind a cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_causal(model)
        config = model.config.get_text_config()
        self._model = model
        self._device = model.device
        self._cache_keyword = cache_keyword(model)
        self._takes_position_ids = "position_ids" in forward_parameters(model)
        self._chooses_logits = chooses_logits(model)
        self._rows: dict[int, _Row] = {}
        self._forward_s = 0.0
        self._subsets: list[HfChainModel] = []
        self.dtype: torch.dtype = model.dtype
        self.num_layers = int(config.num_hidden_layers)
        self.vocab_size = int(config.vocab_size)
        self.max_length = context_length(config)
        self.no_tree_reason = tree_obstacle(model)
        self.no_draft_reason = rollback_obstacle(model)
        if (error := self._failure(num_tokens=1)) is not None:
            name = type(model).__name__
            raise UnsupportedModelError(
                f"{name} cannot read a token behind its cache: {_in_words(error)}"
            ) from error
        if self.no_draft_reason is None and (error := self._failure(num_tokens=2)) is not None:
            self.no_draft_reason = f"{type(model).__name__} cannot read two tokens behind its cache: {_in_words(error)}"

    @property
    def network(self) -> PreTrainedModel:
        """The network."""
        return self._model

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward."""
        return self._forward_s + sum(model.forward_s for model in self._subsets)

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        stateful = self.no_draft_reason is not None
        for sequence in prefixes:
            # Without a config every layer keeps all it read: one that keeps only its window could
            # not take tokens back.
            self._rows[sequence] = _Row(own_cache(self._model) if stateful else DynamicCache())
        self.append(prefixes)

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        stateful = self.no_draft_reason is not None
        for sequence, tokens in pieces.items():
            # Some recurrent layers (Mamba's) start from nothing whenever they read several tokens:
            # they read the prompt whole.
            size = max(len(tokens), 1) if stateful else _PREFILL
            for start in range(0, len(tokens), size):
                part = tokens[start : start + size]
                self._read(self._rows[sequence], part, keep_logits=False)
                self.commit({sequence: range(len(part))})

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        logits: dict[int, Tensor] = {}
        for sequence, block in blocks.items():
            row = self._rows[sequence]
            first = row.num_uncommitted
            if block.parents != tuple(range(first - 1, first - 1 + len(block.parents))):
                raise MongeError(
                    f"this target reads chains only ({self.no_tree_reason}); got a "
                    "tree: use tree='chain'"
                )
            logits[sequence] = self._read(row, block.token_ids, keep_logits=True)
        return logits

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        for sequence, path in paths.items():
            row = self._rows[sequence]
            dropped = row.num_uncommitted - len(path)
            if dropped:
                if self.no_draft_reason is not None:
                    raise MongeError(
                        f"{dropped} read tokens cannot be taken back: {self.no_draft_reason}"
                    )
                row.cache.crop(-dropped)
            row.length += len(path)
            row.num_uncommitted = 0

    def length(self, sequence: int) -> int:
        return self._rows[sequence].length

    def close(self, sequence: int) -> None:
        del self._rows[sequence]

    def layer_subset(self, layers: Sequence[int]) -> "HfChainModel":
        """A model that runs only these layers; see `LayeredModel`."""
        self._subsets.append(HfChainModel(layer_subset(self._model, layers)))
        return self._subsets[-1]

    def _failure(self, num_tokens: int) -> Exception | None:
        """What goes wrong, if anything, when so many tokens are read behind a few."""
        prompt = -1
        failure = catch(
            lambda: (
                self.open({prompt: (0, 0, 0)}),
                self.extend({prompt: NodeBlock.chain((0,) * num_tokens)}),
            )
        )
        self._rows.pop(prompt, None)
        self._forward_s = 0.0
        return failure

    def _read(self, row: _Row, token_ids: Sequence[int], *, keep_logits: bool) -> Tensor:
        first = row.length + row.num_uncommitted
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(token_ids)]).to(self._device, non_blocking=True),
            self._cache_keyword: row.cache,
            "use_cache": True,
        }
        if self._takes_position_ids:
            inputs["position_ids"] = torch.arange(
                first, first + len(token_ids), device=self._device
            )[None]
        if self._chooses_logits and not keep_logits:
            inputs["logits_to_keep"] = 1
        start = now()
        with torch.inference_mode():
            logits = self._model(**inputs).logits
        self._forward_s += now() - start
        row.num_uncommitted += len(token_ids)
        return logits[0]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
