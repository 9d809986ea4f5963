"""A `transformers` network as a model that reads trees."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import MongeError, UnsupportedModelError
from monge.core.model import NodeBlock
from monge.engine.cache import TreeCache
from monge.engine.clock import now
from monge.engine.features import FeatureLog
from monge.engine.masks import UncommittedNodes, block_mask, forward_inputs, within_window
from monge.engine.shortened import shortened
from monge.engine.step import NodeStep, StepSpec

_PREFILL: Final = 1024  # tokens of a prompt that one forward reads: bounds the mask and the activations, not the prompt
_STEP: Final = 64  # nodes a row that a step reads; in larger blocks arithmetic counts, not what lies between operations


@dataclass(slots=True)
class _Row:
    """One sequence: how many columns are committed, and what is read behind them."""

    sequence: int
    length: int = 0
    nodes: UncommittedNodes = field(default_factory=UncommittedNodes)


class HfTreeModel:
    """Reads trees for many sequences in one forward; a `FeatureModel` and a `LayeredModel`.

    Every node gets its own position (committed length + depth) and sees the committed text, its ancestors and itself. Layers
    with a sliding window keep all columns and apply the window in the mask, so trees and rollback are exact there too.

    Args:
        model: A causal language model in evaluation mode that takes 4-D masks and position ids.
        step: Reads small blocks of nodes in the network's place; prompts are always read by the network itself.

    Raises:
        UnsupportedModelError: If the network cannot read trees; the message says why.
    """

    no_draft_reason: str | None = None
    no_tree_reason: str | None = None

    def __init__(self, model: PreTrainedModel, step: NodeStep | None = None) -> None:
        reason = tree_obstacle(model)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self._model, self._step = model, step
        config = model.config.get_text_config()
        self._windows = _layer_windows(config)
        self._attention = str(config._attn_implementation)
        self._device, self._dtype = model.device, model.dtype
        self._cache = TreeCache(config.num_hidden_layers, model.device)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._rows: list[_Row] = []
        self._row_of: dict[int, int] = {}
        self._forward_s = 0.0
        self._shortened: list[HfTreeModel] = []
        self._features: FeatureLog | None = None
        self.hidden_size, self.num_layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.vocab_size = int(config.vocab_size)
        self.max_length = context_length(config)

    def __repr__(self) -> str:
        size = sum(weight.numel() for weight in self._model.parameters()) / 1e6
        how = self._attention if self._step is None else f"{self._attention}, {self._step.name}"
        return f"HfTreeModel({type(self._model).__name__}, {size:.1f}M parameters, {self._dtype}, {how})"

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward."""
        return self._forward_s + sum(model.forward_s for model in self._shortened)

    @property
    def cache_bytes(self) -> int:
        """Memory held by keys and values."""
        return self._cache.num_bytes

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        for sequence in prefixes:
            assert sequence not in self._row_of, f"sequence {sequence} is open already"
            self._row_of[sequence] = len(self._rows)
            self._rows.append(_Row(sequence))
        self.append(prefixes)

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        for start in range(0, max(map(len, pieces.values())), _PREFILL):
            parts = {seq: tuple(tokens[start : start + _PREFILL]) for seq, tokens in pieces.items() if len(tokens) > start}
            self._read({seq: NodeBlock.chain(part) for seq, part in parts.items()}, keep_logits=False)
            self.commit({seq: range(len(part)) for seq, part in parts.items()})

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        logits = self._read(blocks, keep_logits=True)
        first = min(self._row_of[sequence] for sequence in blocks)
        return {sequence: logits[self._row_of[sequence] - first, : len(block.token_ids)] for sequence, block in blocks.items()}

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        for sequence, path in paths.items():
            index = self._row_of[sequence]
            row = self._rows[index]
            # A path that is the first nodes in reading order lies where it belongs.
            if any(slot != position for position, slot in enumerate(path)):
                self._cache.keep(index, row.length, [row.length + slot for slot in path])
            row.length += len(path)
            row.nodes.clear()
            if self._features is not None:
                self._features.commit(sequence, path)

    def length(self, sequence: int) -> int:
        return self._rows[self._row_of[sequence]].length

    def close(self, sequence: int) -> None:
        index = self._row_of.pop(sequence)
        last = self._rows.pop()
        if last.sequence != sequence:
            # The last row fills the gap, so that the batch stays one block of rows.
            self._cache.move_row(len(self._rows), index, last.length + len(last.nodes))
            self._rows[index] = last
            self._row_of[last.sequence] = index
        self._cache.clear_row(len(self._rows))
        if self._features is not None:
            self._features.close(sequence)

    def watch(self, layers: Sequence[int]) -> None:
        if self._rows:
            raise MongeError(f"hidden states must be watched before sequences are open; {len(self._rows)} are")
        self._features = FeatureLog(layers, self.num_layers)
        self._step = None  # a compiled step gives logits only

    def features(self, sequence: int) -> Float[Tensor, "tokens width"] | None:
        return None if self._features is None else self._features.take(sequence)

    def unembed(self, states: Float[Tensor, "nodes hidden"]) -> Float[Tensor, "nodes vocab"]:
        with torch.inference_mode():
            return output_logits(self._model, states)

    def embed(self, token_ids: Sequence[int]) -> Float[Tensor, "nodes hidden"]:
        with torch.inference_mode():
            return self._model.get_input_embeddings()(torch.tensor(list(token_ids), device=self._device))

    def shortened(self, layers: Sequence[int]) -> "HfTreeModel":
        """A model that runs only these layers; see `LayeredModel`."""
        self._shortened.append(HfTreeModel(shortened(self._model, layers)))
        return self._shortened[-1]

    def step_spec(self) -> StepSpec:
        """What a step has to read in this network's place; known once a sequence was opened."""
        kept = self._cache.kept()
        return StepSpec(
            kinds=tuple(self._windows),
            mask_dtype=self._dtype if self._attention == "eager" else torch.bool,
            cache_shapes=tuple((tensor.shape[1], tensor.shape[3]) for tensor in kept),
            dtype=self._dtype,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the bookkeeping contradicts itself."""
        assert len(self._rows) == len(self._row_of), "rows and sequences differ in number"
        for index, row in enumerate(self._rows):
            assert self._row_of[row.sequence] == index, f"row {index} holds sequence {row.sequence}, which is listed elsewhere"
            assert row.length >= 0 and len(row.nodes) >= 0

    def _read(self, blocks: Mapping[int, NodeBlock], *, keep_logits: bool) -> Tensor:
        indices = [self._row_of[sequence] for sequence in blocks]
        rows = slice(min(indices), max(indices) + 1)
        block_of = dict(zip(indices, blocks.values(), strict=True))
        row_blocks = [block_of.get(index, NodeBlock((), ())) for index in range(rows.start, rows.stop)]
        members = self._rows[rows]
        starts = [row.length + len(row.nodes) for row in members]
        for row, block in zip(members, row_blocks, strict=True):
            row.nodes.add(block)
        lengths, nodes = [row.length for row in members], [row.nodes for row in members]
        token_ids, positions, visible = forward_inputs(lengths, nodes, row_blocks)
        held = len(self._rows), max(row.length + len(row.nodes) for row in self._rows)
        self._cache.place(rows, starts, token_ids.shape[1], held)
        token_ids, positions = token_ids.to(self._device), positions.to(self._device)
        masks = self._masks(visible, positions, lengths, nodes)
        start = now()
        with torch.inference_mode():
            if self._step is not None and keep_logits and token_ids.shape[1] <= _STEP and self._cache.is_settled:
                logits = self._step(token_ids, positions, tuple(masks.values()), self._cache)
            else:
                output = self._whole(token_ids, positions, masks, keep_logits=keep_logits)
                logits = output.logits
                if self._features is not None:
                    states = [output.hidden_states[layer] for layer in self._features.layers]
                    for index, (sequence, block) in zip(indices, blocks.items(), strict=True):
                        row_states = [state[index - rows.start, : len(block.token_ids)] for state in states]
                        self._features.read(sequence, row_states)
        self._forward_s += now() - start
        self._cache.settle()
        return logits

    def _whole(self, token_ids: Tensor, positions: Tensor, masks: Mapping[str, Any], *, keep_logits: bool) -> Any:
        """Output of a forward of the network itself."""
        inputs: dict[str, Any] = {
            "input_ids": token_ids,
            "position_ids": positions,
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if self._takes_logits_to_keep and not keep_logits:
            inputs["logits_to_keep"] = 1
        if self._features is not None:
            inputs["output_hidden_states"] = True
        return self._model(**inputs)

    def _masks(
        self,
        visible: Bool[Tensor, "batch nodes seq"],
        positions: Tensor,
        lengths: Sequence[int],
        nodes: Sequence[UncommittedNodes],
    ) -> dict[str, Any]:
        """For every kind of layer the mask that its attention takes."""
        masks: dict[str, Any] = {}
        for kind, window in self._windows.items():
            seen = visible if window is None else within_window(visible, positions, lengths, nodes, window)
            masks[kind] = self._attention_form(seen.to(self._device)[:, None])
        return masks

    def _attention_form(self, seen: Bool[Tensor, "batch one nodes seq"]) -> Any:
        if self._attention == "eager":
            hidden = torch.finfo(self._dtype).min
            return torch.where(seen, torch.zeros((), dtype=self._dtype, device=self._device), hidden)
        if self._attention == "flex_attention":
            return block_mask(seen)
        return seen


def tree_obstacle(model: PreTrainedModel) -> str | None:
    """Why a network cannot read trees, or `None` where it can."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if is_stateful(model):
        return f"{name} keeps recurrent state, through which a tree cannot be read in one pass"
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        return f"{name} takes positions from the order of the tokens (ALiBi or similar), so siblings cannot share one"
    if str(config._attn_implementation) not in {"eager", "sdpa", "flex_attention"}:
        return f"{name} runs attention {config._attn_implementation!r}, which takes no 4-D mask; load it with eager or sdpa"
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        return f"{name} has layers of kind {', '.join(sorted(unknown))}, whose mask is not known here"
    return None


def output_logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    """What the network makes of last hidden states: its output layer, with the scale and the cap that some families add."""
    config = model.config.get_text_config()
    output_layer = model.get_output_embeddings()
    if output_layer is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no output layer, so its hidden states give no logits")
    logits = output_layer(states)
    logits = logits * float(getattr(config, "logit_scale", None) or 1.0)
    logits = logits / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether the network carries state that cannot be rolled back."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(model._is_stateful) or any("linear" in kind or "mamba" in kind for kind in kinds)


def context_length(config: Any) -> int | None:
    """Longest sequence that the network's positions allow, if bounded.

    Rotary embeddings that change with the length of the text (dynamic, longrope) are bounded where they start to: past that
    point a position of an unverified node would change the embedding of the committed ones.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in {"dynamic", "longrope"} and original:
        return int(original)
    for name in ("max_position_embeddings", "n_positions"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return None


def _layer_windows(config: Any) -> dict[str, int | None]:
    """Sliding window (or `None`) of every kind of attention layer."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}
