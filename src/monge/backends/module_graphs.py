"""Small modules beside a network, such as heads and the output layer, captured as CUDA graphs."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from monge.backends.chain_graphs import ChainGraph, is_chain
from monge.backends.cuda import MAX_GRAPHS, WIDTHS, Capture, CapturedGraph, Outputs, captured
from monge.backends.parity_check import as_backend_error, check_module
from monge.laws.levels import DrawnLevels, LevelDraws
from monge.networks.attention_masks import masks_behind
from monge.networks.base import CachedStep, ModuleForward
from monge.networks.forward import MAX_ROWS, Forward


class ModuleGraph:
    """A small module beside a network, with a CUDA graph for each number of rows in `WIDTHS`.

    Graphs are captured by `prepare`, or at first use.
    """

    def __init__(self, module: torch.nn.Module, capture: Capture) -> None:
        self._module, self._capture = module, capture
        self._graphs: dict[int, CapturedGraph] = {}

    def __call__(self, *inputs: Tensor) -> Outputs:
        rows = len(inputs[0])
        width = next((width for width in WIDTHS if width >= rows), None)
        if width is None:
            return self._module(*inputs)
        with torch.inference_mode():
            if width not in self._graphs:
                self._graphs[width] = self._captured(inputs, width)
            graph = self._graphs[width]
            for static, given in zip(graph.inputs, inputs, strict=True):
                static[:rows].copy_(given, non_blocking=True)
            graph.replay()
            return tuple(output[:rows].clone() for output in graph.outputs)

    def prepare(self, like: Sequence[Tensor]) -> None:
        """Capture all graphs, for inputs of these widths and types."""
        for width in WIDTHS:
            self(*(tensor.new_zeros(width, *tensor.shape[1:]) for tensor in like))

    def _captured(self, inputs: Sequence[Tensor], width: int) -> CapturedGraph:
        static_inputs = tuple(given.new_zeros(width, *given.shape[1:]) for given in inputs)
        replay, outputs = captured(self._capture, lambda: self._module(*static_inputs))
        return CapturedGraph(static_inputs, (), replay, outputs, ())


class StepGraph:
    """A `CachedStep` with a CUDA graph for each number of texts and nodes, captured at first use.

    Graphs give logits of all nodes, and see all columns of the cache. They are captured anew when
    it moves.
    """

    def __init__(self, module: CachedStep, capture: Capture) -> None:
        self._module, self._capture = module, capture
        self._capacity = 0
        self._graphs: OrderedDict[tuple[int, ...], CapturedGraph] = OrderedDict()
        self._chains: OrderedDict[tuple[Any, ...], tuple[ChainGraph, Tensor]] = OrderedDict()

    def __call__(
        self,
        token_ids: Tensor,
        states: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        masks: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> Outputs:
        if token_ids.numel() > MAX_ROWS:
            return self._module(token_ids, states, places, masks, kept)
        positions, columns, shown = places
        self._follow(kept)
        # A cache gives the same tensors while it stays; graphs hold theirs, so no name comes twice.
        key = (*token_ids.shape, id(kept[0]))
        inputs = token_ids, states, positions, columns
        with torch.inference_mode():
            if key not in self._graphs:
                self._graphs[key] = self._captured(inputs, kept)
                if len(self._graphs) > MAX_GRAPHS:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            graph = self._graphs[key]
            for static, given in zip(graph.inputs, inputs, strict=True):
                static.copy_(given, non_blocking=True)
            for seen, mask in zip(graph.masks, masks, strict=True):
                seen.fill_(False)
                seen[..., : mask.shape[-1]] = mask
            graph.replay()
            hidden, logits = graph.outputs
            return hidden.clone(), logits[shown]

    def draw_levels(
        self, given: LevelDraws, states: Tensor, lengths: Sequence[int], kept: Sequence[Tensor]
    ) -> DrawnLevels | None:
        """Draw chains after texts by CUDA graphs; `None` for other trees.

        There is a graph for each number of rows and kind of sampling rules.

        Args:
            given: What they are drawn from.
            states: The head's states at the roots, `[rows, 1, width]`.
            lengths: Committed tokens of the rows.
            kept: Keys and values of the rows.
        """
        if not is_chain(given.shape):
            return None
        self._follow(kept)
        kind = given.rules[0].kind
        key = kind, id(kept[0]), id(given.draft_ids)
        if key not in self._chains:
            starts = torch.tensor(lengths).to(states.device)
            self._chains[key] = self._captured_chain(given, states, starts, kept)
            if len(self._chains) > MAX_GRAPHS:
                self._chains.popitem(last=False)
        self._chains.move_to_end(key)
        chain, static_states = self._chains[key]
        static_states.copy_(states)
        return chain.draw(given, slice(0, len(lengths)), lengths)

    def _captured_chain(
        self, given: LevelDraws, states: Tensor, starts: Tensor, kept: Sequence[Tensor]
    ) -> tuple[ChainGraph, Tensor]:
        static_states = states.clone()
        columns = torch.arange(kept[0].shape[2], device=states.device)
        every = torch.arange(len(starts), device=states.device)

        def read(token_ids: Tensor, lengths: Tensor) -> Tensor:
            masks = masks_behind(lengths, columns, self._module.windows)
            places = lengths[:, None], lengths[:, None], every
            hidden, logits = self._module(token_ids, static_states, places, masks, kept)
            static_states.copy_(hidden)
            return logits[:, None]

        capture = partial(captured, self._capture)
        kind = given.rules[0].kind
        return ChainGraph(capture, read, starts, kind, given.draft_ids), static_states

    def _follow(self, kept: Sequence[Tensor]) -> None:
        """Drop the graphs of a cache that has moved."""
        if kept[0].shape[2] != self._capacity:
            self._graphs.clear()
            self._chains.clear()
            self._capacity = kept[0].shape[2]

    def _captured(self, inputs: Sequence[Tensor], kept: Sequence[Tensor]) -> CapturedGraph:
        token_ids, states, positions, columns = (tensor.clone() for tensor in inputs)
        (batch, nodes), device = token_ids.shape, token_ids.device
        every = torch.arange(batch * nodes, device=device)
        shape = batch, 1, nodes, kept[0].shape[2]
        masks = [torch.ones(shape, dtype=torch.bool, device=device) for _ in self._module.windows]
        places = positions, columns, every
        replay, outputs = captured(
            self._capture, lambda: self._module(token_ids, states, places, masks, kept)
        )
        static_inputs = token_ids, states, positions, columns
        return CapturedGraph(static_inputs, tuple(masks), replay, outputs, (every, *kept))


def capture_module(
    module: torch.nn.Module, like: Sequence[Tensor], capture: Capture
) -> Forward[ModuleForward]:
    """Make a module's graphs, and check them against the module; see `FeatureModel.module_forward`.

    Raises:
        BackendError: If the module cannot be captured; the message gives the reason.
    """
    is_step = isinstance(module, CachedStep)
    graphs = StepGraph(module, capture) if is_step else ModuleGraph(module, capture)
    with as_backend_error(f"{type(module).__name__} cannot be captured"):
        check_module(module, graphs, like, "captured")
        if isinstance(graphs, ModuleGraph):
            graphs.prepare(like)
    return Forward(graphs)
