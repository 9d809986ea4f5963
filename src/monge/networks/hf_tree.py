"""A `transformers` network as a model that reads trees."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError, MongeError, UnsupportedModelError
from monge.laws.levels import DrawnTrees, RootDraws, draw_levels
from monge.networks.attention_masks import MaskFormat, level_blocks
from monge.networks.base import CachedStep, ModuleForward, NodeBlock, Recorder
from monge.networks.forward import (
    Forward,
    ForwardMaker,
    ForwardSpec,
    NetworkForward,
    backend_of,
    make_ready,
)
from monge.networks.head_model import CachedHead
from monge.networks.hf_model import HfModel
from monge.networks.hidden_states import HiddenStateLog, HiddenStates
from monge.networks.network_facts import (
    OutputLayer,
    layer_windows,
    num_weights,
    why_no_tree,
)
from monge.networks.network_state import NetworkVersion
from monge.networks.prefix_cache import KeyValues, PrefixCache
from monge.networks.tree_cache import CAPTURED_ROOM, CacheRow, TreeCache, power_of_two
from monge.runtime.clock import now

_PREFILL: Final = 1024
"""Tokens of a prompt that one forward reads: bounds the mask and the activations, not the prompt."""
_FORWARD: Final = 32
"""Tokens whose reading takes as long as the fixed cost of a forward."""
_RECORDED: Final = 256
_LAUNCHED: Final = 1024
"""The same on a GPU: a CUDA graph waits for weights, another forward for launches of layers."""

_EAGER: Final = "backend 'compiled' is not used, the network runs eagerly"
_EAGER_STATES: Final = "hidden states are watched, so every step of the target runs eagerly"
"""Starts of warnings; the reason follows."""

Made = TypeVar("Made", bound=Callable[..., Any])
ModuleMaker = Callable[[torch.nn.Module, Sequence[Tensor]], Forward[ModuleForward]]
"""Makes the forward of a module for inputs of these widths and types, or of a `CachedStep` for numbers of this type; raises
`BackendError`."""


class HfTreeModel(HfModel):
    """Reads trees for many sequences in one forward; a `FeatureModel`.

    Every node gets its own position (committed length + depth) and sees the committed text, its
    ancestors and itself. Layers with a sliding window keep all columns and apply the window in the
    mask, so trees and rollback are exact there too.

    Args:
        model: A causal language model in evaluation mode that takes 4-D masks and position ids.
        make_forward: Makes the forward of the network, and others when hidden states are watched;
            `None` for the network itself.
        make_module: Makes forwards of the output layer and of a head's modules; `None` runs them.
        module_packer: Stores the matrices of a head's modules in a faster form; `None` leaves them.

    Raises:
        UnsupportedModelError: If the network cannot read trees; the message says why.
    """

    why_no_draft: str | None = None
    why_no_tree: str | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        make_forward: ForwardMaker | None = None,
        make_module: ModuleMaker | None = None,
        module_packer: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        super().__init__(model)
        self._make_forward = Forward[NetworkForward] if make_forward is None else make_forward
        self._use(self._make_forward(self._eager), _EAGER)
        reason = why_no_tree(model)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self._make_module, self._module_packer = make_module, module_packer
        self._output: ModuleForward | None = None
        self._modules = list[Forward[ModuleForward]]()
        config = model.config.get_text_config()
        attention, windows = str(config._attn_implementation), layer_windows(config)
        self._form = MaskFormat(windows, attention, self.dtype, self._device)
        widths = self._forward.run.widths
        room: dict[str, Any] = {**CAPTURED_ROOM, "spare": widths[-1]} if widths else {}
        self._cache = TreeCache(config.num_hidden_layers, model.device, **room)
        self.hidden_size = int(config.hidden_size)
        self._states = HiddenStates(self.num_layers)
        self._prefixes: PrefixCache | None = None
        self._version, self._opened = NetworkVersion(), dict[int, int]()

    def __repr__(self) -> str:
        size = num_weights(self.network) / 1e6
        backend = backend_of(self)
        how = self._form.attention + ("" if backend == "eager" else f", {backend}")
        return f"HfTreeModel({type(self.network).__name__}, {size:.1f}M parameters, {self.dtype}, {how})"

    @property
    def cache_bytes(self) -> int:
        """Memory held by keys and values."""
        return self._cache.num_bytes

    @property
    def forward(self) -> NetworkForward:
        """The forward that reads blocks of nodes; compiled now if that is pending."""
        make_ready(self.forwards)
        return self._forward.run

    @property
    def forwards(self) -> tuple[Forward[Any], ...]:
        """The forwards of modules beside the network, and of the network."""
        return *self._modules, self._forward

    @property
    def record(self) -> Recorder | None:
        """Runs functions of the logits, if the backend captures them."""
        return self._forward.run.record

    def prepare(self, num_rows: int, num_nodes: int, *, drafts: bool = False) -> None:
        """See `PreparedModel`."""
        if not self._cache.num_open:
            self._forward.run.prepare(num_rows, num_nodes, self._cache, drafts=drafts)

    def update_weights(self) -> None:
        super().update_weights()
        if self._prefixes is not None:
            self._prefixes.clear()
        if not (self._forward.is_ready and self._forward.run.follow(self.network)):
            self._use(self._make_forward(self._eager), self._forward.warning)
        for module in self._modules:
            if follow := getattr(module.run, "follow", None):
                follow()

    @property
    def num_open(self) -> int:
        return self._cache.num_open

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        if self.source is not None:
            self.source.check()
        self.forward.lay_out(self._cache)
        if self._prefixes is not None:
            self._opened |= dict.fromkeys(prefixes, self.weights_version)
        for sequence in prefixes:
            self._cache.open(sequence)
        self.append(prefixes)

    @property
    def prefixes(self) -> PrefixCache | None:
        """See `PrefixModel`."""
        return self._prefixes

    @prefixes.setter
    def prefixes(self, prefixes: PrefixCache | None) -> None:
        self._prefixes = prefixes
        self._states.archive(is_wanted=prefixes is not None)

    @property
    def bytes_per_token(self) -> int:
        num_states = len(self._states.layers) * self.hidden_size
        return self._cache.bytes_per_token + num_states * self.dtype.itemsize

    @property
    def weights_version(self) -> int:
        return self._version.of(self.network)

    def is_complete(self, sequence: int) -> bool:
        if sequence in self._long or not self._cache.holds(sequence):
            return False  # keys of a long text are those of its length
        if self._opened.get(sequence) != self.weights_version:
            return False  # some of its keys were computed with other weights
        return self._states.is_complete(sequence, self.length(sequence))

    def save(self, sequence: int, start: int, stop: int) -> KeyValues:
        states = self._states.save(sequence, start, stop)
        return (*self._cache.save(sequence, start, stop), *states)

    def load(self, sequence: int, kept: Sequence[KeyValues]) -> None:
        if not self._states.layers:
            self._cache.load(sequence, kept)
            return
        self._cache.load(sequence, [piece[:-1] for piece in kept])
        self._states.load(sequence, torch.cat([piece[-1] for piece in kept]))

    def _append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        if self._prefixes is not None and not self._is_long:
            unread = self._prefixes.unread
            pieces = {
                sequence: unread(self, sequence, tokens) for sequence, tokens in pieces.items()
            }
        for start in range(0, max(map(len, pieces.values()), default=0), _PREFILL):
            parts = {
                sequence: tuple(tokens[start : start + _PREFILL])
                for sequence, tokens in pieces.items()
                if len(tokens) > start
            }
            sizes = {sequence: len(part) for sequence, part in parts.items()}
            forward = self._forward.run
            recorded = forward.prompt_tokens if forward.widths else 0
            for group in group_by_length(sizes, recorded):
                self._read(
                    {sequence: NodeBlock.chain(parts[sequence]) for sequence in group},
                    keep_logits=False,
                )
                self.commit({sequence: range(len(parts[sequence])) for sequence in group})

    def _extend(self, blocks: Mapping[int, NodeBlock]) -> dict[int, Tensor]:
        cache, forward = self._cache, self._forward.run
        if len(blocks) == 1 and forward.reads_chains and cache.is_settled:
            ((sequence, block),) = blocks.items()
            row, is_small = cache.row(sequence), len(block.parents) <= forward.max_nodes
            is_chain = row.nodes.is_chain and not any(self._form.windows.values())
            if is_small and is_chain and block.continues(len(row.nodes)):
                return {sequence: self._read_chain(row, block, forward)}
        logits = self._read(blocks, keep_logits=True)
        first = cache.rows.start
        return {
            sequence: logits[cache.index(sequence) - first, : len(block.parents)]
            for sequence, block in blocks.items()
        }

    def draw_trees(self, draws: RootDraws) -> DrawnTrees:
        """See `LevelModel`."""
        cache = self._cache
        where, shape = cache.together(draws.logits), draws.shape
        rows = cache.rows_in(where)
        requests, blocks = [row.sequence for row in rows], level_blocks(shape)

        def read(token_ids: Tensor, level: int) -> Tensor:
            nodes = dict.fromkeys(requests, blocks[level])
            return self._read(nodes, keep_logits=True, token_ids=token_ids)[:, : shape.sizes[level]]

        with torch.inference_mode():
            given = draws.rows(requests)
            lengths = [row.length for row in rows]
            drawn = self._forward.run.draw_levels(given, where, lengths, cache)
            if drawn is None:
                drawn = draw_levels(given, read)
            else:
                for row in rows:
                    for block in blocks:
                        row.nodes.add(block)
            return DrawnTrees(requests, drawn, draws.draft_ids)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        super().commit(paths)
        for sequence, path in paths.items():
            row = self._cache.row(sequence)
            # A path that is the first nodes in reading order lies where it belongs.
            if any(slot != position for position, slot in enumerate(path)):
                columns = [row.length + slot for slot in path]
                self._cache.keep(self._cache.index(sequence), row.length, columns)
            row.length += len(path)
            row.nodes.clear()
        if self._states.layers:
            self._states.commit(paths)

    def length(self, sequence: int) -> int:
        return self._cache.row(sequence).length

    def close(self, sequence: int) -> None:
        self._cache.close(sequence)
        self._opened.pop(sequence, None)
        # Graphs are captured for this memory.
        if not self._cache.num_open and not self._forward.run.widths:
            self._cache.give_back()
        self._states.close(sequence)
        super().close(sequence)

    def watch(self, layers: Sequence[int], *, only_last: bool = False) -> HiddenStateLog:
        if self._cache.num_open:
            raise MongeError(
                "hidden states must be watched before sequences are open; "
                f"{self._cache.num_open} are"
            )
        log = self._states.watch(layers, only_last=only_last)
        if self._states.layers != self._eager.layers:
            self._eager = NetworkForward(self.network, self._states.layers)
            forward = self._made(self._make_forward, _EAGER_STATES, self._eager)
            self._use(forward or Forward(self._eager), _EAGER_STATES)
        return log

    def unembed(self, states: Float[Tensor, "nodes hidden"]) -> Float[Tensor, "nodes vocab"]:
        with torch.inference_mode():
            if self._output is None:
                self._output = self.module_forward(OutputLayer(self.network), (states[:1],))
            return self._output(states)[0]

    def embed(
        self, token_ids: Sequence[int] | Int64[Tensor, " nodes"]
    ) -> Float[Tensor, "nodes hidden"]:
        if not isinstance(token_ids, Tensor):
            token_ids = torch.tensor(list(token_ids)).to(self._device, non_blocking=True)
        with torch.inference_mode():
            return self.network.get_input_embeddings()(token_ids)

    def module_forward(self, module: torch.nn.Module, like: Sequence[Tensor]) -> ModuleForward:
        """See `FeatureModel`."""
        if self._make_module is None:
            return module
        forward = self._made(self._make_module, Forward.warning, module, like)
        if forward is None:
            return module
        self._modules.append(forward)
        return forward

    def head_model(self, read: CachedStep, step: CachedStep) -> CachedHead:
        """See `FeatureModel`."""
        like = self.embed((0,))
        for module in (read, step):
            if module.embedding is None:
                module.embedding = self.network.get_input_embeddings()
        if not step.is_traceable:
            return CachedHead(read, step, step, like)
        reads, steps = (self.module_forward(module, (like,)) for module in (read, step))
        draw = getattr(steps.run, "draw_levels", None) if isinstance(steps, Forward) else None
        return CachedHead(reads, steps, step, like, draw)

    def pack_module(self, module: torch.nn.Module) -> None:
        """See `FeatureModel`."""
        if self._module_packer is not None:
            self._module_packer(module)

    def forward_spec(self) -> ForwardSpec:
        """Return the inputs of a forward of this network; known once a sequence was opened."""
        kept = self._cache.kept()
        return ForwardSpec(
            kinds=tuple(self._form.windows),
            windows=tuple(self._form.windows.values()),
            mask_dtype=self._form.mask_dtype,
            cache_shapes=tuple((tensor.shape[1], tensor.shape[3]) for tensor in kept),
            dtype=self.dtype,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the bookkeeping contradicts itself."""
        self._cache.check_integrity()

    @contextmanager
    def _plainly(self, text: tuple[int, Sequence[int]] | None) -> Iterator[None]:
        forward, self._forward = self._forward, Forward[NetworkForward](self._eager)
        try:
            if text is not None:
                # What a head needs of these tokens, it has.
                states, self._states = self._states, HiddenStates(self.num_layers)
                try:
                    self._cache.row(text[0]).length = 0
                    self._append(dict([text]))
                finally:
                    self._states = states
            yield
        finally:
            self._forward = forward

    def _made(self, make: Callable[..., Made], warning: str, *given: Any) -> Made | None:
        """Return what a backend makes, or `None` with a warning."""
        try:
            return make(*given)
        except BackendError as error:
            warnings.warn(f"{warning}: {error}", stacklevel=4)
            return None

    def _use(self, forward: Forward[NetworkForward], warning: str) -> None:
        """Read by this forward from now on."""
        self._forward, forward.warning = forward, warning

    def _read(
        self,
        blocks: Mapping[int, NodeBlock],
        *,
        keep_logits: bool,
        token_ids: Int64[Tensor, "batch nodes"] | None = None,
    ) -> Tensor:
        """Read blocks; their tokens are those on the device, row by row, where they are given."""
        cache, forward = self._cache, self._forward.run
        widths = forward.widths if keep_logits and cache.is_settled else ()
        ids, positions, masks = cache.add(blocks, self._form, widths)
        if token_ids is not None:
            ids[:, : token_ids.shape[1]] = token_ids
        start = now()
        with torch.inference_mode():
            try:
                output = forward(ids, positions, masks, cache, keep_logits=keep_logits)
            except (TypeError, ValueError, AttributeError) as error:
                if cache.is_settled or isinstance(error, MongeError):
                    raise
                raise UnsupportedModelError(
                    f"{type(self.network).__name__} cannot read text with position ids and a 4-D "
                    f"mask: {type(error).__name__}: {error}; use the network without monge"
                ) from error
            if self._states.layers:
                first = cache.rows.start
                places = {
                    sequence: (cache.index(sequence) - first, len(block.parents))
                    for sequence, block in blocks.items()
                }
                self._states.read(places, output.states)
        self._forward_s += now() - start
        cache.settle()
        return output.logits

    def _read_chain(self, row: CacheRow, block: NodeBlock, forward: NetworkForward) -> Tensor:
        """`_read` for a chain after a single text."""
        cache, start = self._cache, now()
        index = cache.index(row.sequence)
        cache.place(slice(index, index + 1), (row.end,), len(block.parents))
        row.nodes.add(block)
        with torch.inference_mode():
            output = forward.read_chain(block.token_ids, cache.starts[0], cache)
            if self._states.layers:
                self._states.read({row.sequence: (0, len(block.parents))}, output.states)
            logits = output.logits[0]
        self._forward_s += now() - start
        return logits


def make_models_ready(models: Iterable[object]) -> None:
    """Compile the pending forwards of models and of modules beside them; see `make_ready`."""
    tree_models = (model for model in models if isinstance(model, HfTreeModel))
    make_ready([forward for model in tree_models for forward in model.forwards])


def group_by_length(sizes: Mapping[int, int], recorded: int = 0) -> list[list[int]]:
    """Split texts into groups that are read in one forward each, padded to their longest text.

    A group costs its rows times its longest text, plus the fixed cost of a forward. The cheapest
    split keeps the texts in order of size; dynamic programming finds it.

    Args:
        sizes: Tokens of every text, by its number.
        recorded: Most tokens of a forward that a device need not launch layer by layer, both rows
            and lengths padded to powers of two; 0 if every forward costs the same.

    Returns:
        Numbers of each group, longest texts first.
    """
    keys = sorted(sizes, key=lambda key: -sizes[key])

    def cost(rows: int, longest: int) -> int:
        padded = power_of_two(rows) * power_of_two(longest)
        if not recorded:
            return _FORWARD + rows * longest
        return _RECORDED + padded if padded <= recorded else _LAUNCHED + rows * longest

    least, firsts = [0], [0]
    for stop in range(1, len(keys) + 1):
        cheapest, first = min(
            (least[first] + cost(stop - first, sizes[keys[first]]), first) for first in range(stop)
        )
        least.append(cheapest)
        firsts.append(first)
    groups: list[list[int]] = []
    stop = len(keys)
    while stop:
        groups.append(keys[firsts[stop] : stop])
        stop = firsts[stop]
    return groups[::-1]
