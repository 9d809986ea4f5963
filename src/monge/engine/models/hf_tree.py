"""A `transformers` network as a model that reads trees."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError, MongeError, UnsupportedModelError
from monge.core.levels import DrawnTrees, LevelShape, RootDraws, draw_levels, draws_of
from monge.core.model import CachedStep, Forward, NodeBlock
from monge.engine.clock import now
from monge.engine.models.forward_program import (
    FollowingProgram,
    ForwardOutput,
    ForwardProgram,
    Pending,
    Program,
    ProgramMaker,
    ProgramSpec,
    backend_of,
    make_programs,
)
from monge.engine.models.head_model import CachedHead
from monge.engine.models.hf_model import HfModel
from monge.engine.models.hidden_states import HiddenStateLog, HiddenStates
from monge.engine.models.masks import MaskFormat, level_blocks
from monge.engine.models.network_facts import (
    OutputLayer,
    layer_windows,
    no_tree_reason,
    num_weights,
)
from monge.engine.models.network_state import NetworkVersion
from monge.engine.models.tree_cache import RECORDED_ROOM, CacheRow, TreeCache, power_of_two
from monge.engine.prefix_cache import KeyValues, PrefixCache
from monge.verify.problem import Recorder

_PREFILL: Final = 1024
"""Tokens of a prompt that one forward reads: bounds the mask and the activations, not the prompt."""
_UNWANTED: Final = 1 << 20
"""Most logits that a program may compute without need, for a short prompt and a small vocabulary."""
_FORWARD: Final = 32
"""Tokens whose reading takes as long as the fixed cost of a forward."""
_RECORDED: Final = 256
_LAUNCHED: Final = 1024
"""The same on a GPU: a CUDA graph waits for weights, another forward for launches of layers."""
_ROWS: Final = 64
"""Rows that the program of a module reads: with more, arithmetic counts, and the module does as well."""

_PART: Final = "part of a head runs eagerly"
"""Start of the warning if a module has no program; the reason follows."""

ModuleMaker = Callable[[torch.nn.Module, Sequence[Tensor]], Forward | Pending[Forward]]
"""Makes a program of a module for inputs of these widths and types, or of a `CachedStep` for numbers of this type, or says how
to; raises `BackendError`."""


class HfTreeModel(HfModel):
    """Reads trees for many sequences in one forward; a `FeatureModel`.

    Every node gets its own position (committed length + depth) and sees the committed text, its
    ancestors and itself. Layers with a sliding window keep all columns and apply the window in the
    mask, so trees and rollback are exact there too.

    Args:
        model: A causal language model in evaluation mode that takes 4-D masks and position ids.
        program: Reads small blocks of nodes and short prompts instead of the network. A pending
            program is made when it is needed.
        program_maker: Makes the program that gives watched hidden states as well.
        module_maker: Makes programs of the output layer and of a head's modules; `None` runs them.
        module_packer: Stores the matrices of a head's modules in a faster form; `None` leaves them.

    Raises:
        UnsupportedModelError: If the network cannot read trees; the message says why.
    """

    no_draft_reason: str | None = None
    no_tree_reason: str | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        program: ForwardProgram | Pending[ForwardProgram] | None = None,
        program_maker: ProgramMaker | None = None,
        module_maker: ModuleMaker | None = None,
        module_packer: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        super().__init__(model)
        reason = no_tree_reason(model)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self._program_maker = program_maker
        self._module_maker, self._module_packer = module_maker, module_packer
        self._output: Forward | None = None
        self._module_programs = list[Program[Forward]]()
        config = model.config.get_text_config()
        attention, windows = str(config._attn_implementation), layer_windows(config)
        self._form = MaskFormat(windows, attention, self.dtype, self._device)
        room: dict[str, Any] = {}
        if isinstance(program, ForwardProgram) and program.widths:
            room = {**RECORDED_ROOM, "spare": program.widths[-1]}
        self._cache = TreeCache(config.num_hidden_layers, model.device, **room)
        self.hidden_size = int(config.hidden_size)
        self._states = HiddenStates(self.num_layers)
        self._use(program)
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
    def program(self) -> ForwardProgram | None:
        """The program that reads small blocks in the network's place; makes it if it is pending."""
        make_programs(self.programs)
        return self._program.run

    @property
    def programs(self) -> tuple[Program[Any], ...]:
        """Programs of modules beside the network, and of the network."""
        return *self._module_programs, self._program

    @property
    def record(self) -> Recorder | None:
        """Runs functions of the logits, if the backend records them."""
        program = self._program.run
        return None if program is None else program.record

    def prepare(self, num_rows: int, num_nodes: int, *, drafts: bool = False) -> None:
        """See `PreparedModel`."""
        program, cache = self._program.run, self._cache
        if program is None or not program.widths or cache.num_open:
            return
        if not cache.is_settled:
            cache.lay_out(program.spec.cache_shapes, self.dtype)
        if cache.is_settled:
            program.prepare(num_rows, num_nodes, cache, drafts=drafts)

    def update_weights(self) -> None:
        super().update_weights()
        if self._prefixes is not None:
            self._prefixes.clear()
        run, maker = self._program.run, self._program_maker
        is_stale = self._program.pending is not None or run is not None
        if is_stale and not (run is not None and run.follow(self.network)) and maker is not None:
            self._use(maker(self._states.layers))
        for program in self._module_programs:
            if isinstance(program.run, FollowingProgram):
                program.run.follow()

    @property
    def num_open(self) -> int:
        return self._cache.num_open

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        if self.source is not None:
            self.source.check()
        program, cache = self.program, self._cache
        if program is not None and program.reads_prompts and not cache.is_settled:
            cache.lay_out(program.spec.cache_shapes, self.dtype)
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
            program = self._program.run
            recorded = program.prompt_tokens if program and program.widths else 0
            for group in group_by_length(sizes, recorded):
                self._read(
                    {sequence: NodeBlock.chain(parts[sequence]) for sequence in group},
                    keep_logits=False,
                )
                self.commit({sequence: range(len(parts[sequence])) for sequence in group})

    def _extend(self, blocks: Mapping[int, NodeBlock]) -> dict[int, Tensor]:
        cache, program = self._cache, self._program.run
        if len(blocks) == 1 and program and program.reads_chains and cache.is_settled:
            ((sequence, block),) = blocks.items()
            row, is_small = cache.row(sequence), len(block.parents) <= program.max_nodes
            is_chain = row.nodes.is_chain and not any(self._form.windows.values())
            if is_small and is_chain and block.continues(len(row.nodes)):
                return {sequence: self._read_chain(row, block, program)}
        logits = self._read(blocks, keep_logits=True)
        first = cache.rows.start
        return {
            sequence: logits[cache.index(sequence) - first, : len(block.parents)]
            for sequence, block in blocks.items()
        }

    def draw_trees(
        self,
        logits: Mapping[int, Float[Tensor, "one vocab"]],
        draws: Mapping[int, RootDraws],
        shape: LevelShape,
        draft_ids: Int64[Tensor, " vocab"] | None = None,
    ) -> DrawnTrees:
        """See `LevelModel`."""
        cache, program = self._cache, self._program.run
        where = cache.together(logits)
        rows = cache.rows_in(where)
        requests, blocks = [row.sequence for row in rows], level_blocks(shape)

        def read(token_ids: Tensor, level: int) -> Tensor:
            nodes = dict.fromkeys(requests, blocks[level])
            return self._read(nodes, keep_logits=True, token_ids=token_ids)[:, : shape.sizes[level]]

        with torch.inference_mode():
            given = draws_of(requests, logits, draws, shape, draft_ids)
            lengths, drawn = [row.length for row in rows], None
            if program is not None:
                drawn = program.draw_levels(given, where, lengths, cache)
            if drawn is None:
                drawn = draw_levels(given, read)
            else:
                for row in rows:
                    for block in blocks:
                        row.nodes.add(block)
            return DrawnTrees(requests, drawn, draft_ids)

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
        # Programs of fixed widths may be recorded for this memory.
        program = self._program.run
        if not self._cache.num_open and not (program and program.widths):
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
        self._use(self._watching_program(self._states.layers))
        return log

    def unembed(self, states: Float[Tensor, "nodes hidden"]) -> Float[Tensor, "nodes vocab"]:
        with torch.inference_mode():
            if self._output is None:
                self._output = self.module_program(OutputLayer(self.network), (states[:1],))
            return self._output(states)[0]

    def embed(
        self, token_ids: Sequence[int] | Int64[Tensor, " nodes"]
    ) -> Float[Tensor, "nodes hidden"]:
        if not isinstance(token_ids, Tensor):
            token_ids = torch.tensor(list(token_ids)).to(self._device, non_blocking=True)
        with torch.inference_mode():
            return self.network.get_input_embeddings()(token_ids)

    def module_program(self, module: torch.nn.Module, like: Sequence[Tensor]) -> Forward:
        """See `FeatureModel`."""
        program = self._made(module, like)
        if program is None:
            return module
        return lambda *inputs: (program if len(inputs[0]) <= _ROWS else module)(*inputs)

    def head_model(self, read: CachedStep, step: CachedStep) -> CachedHead:
        """See `FeatureModel`."""
        like, draw = self.embed((0,)), None
        for module in (read, step):
            if module.embedding is None:
                module.embedding = self.network.get_input_embeddings()
        reads: Forward = read
        steps: Forward = step
        if step.has_program:
            first, second = (self._made(module, (like,)) for module in (read, step))
            reads = read if first is None else _for_few(first, read)
            steps = step if second is None else _for_few(second, step)
            draw = getattr(second, "draw_levels", None)
        return CachedHead(reads, steps, step, like, draw)

    def pack_module(self, module: torch.nn.Module) -> None:
        """See `FeatureModel`."""
        if self._module_packer is not None:
            self._module_packer(module)

    def program_spec(self) -> ProgramSpec:
        """Return the inputs of a program for this network; known once a sequence was opened."""
        kept = self._cache.kept()
        return ProgramSpec(
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
        program, self._program = self._program, Program(None)
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
            self._program = program

    def _made(self, module: torch.nn.Module, like: Sequence[Tensor]) -> Forward | None:
        """The program of a module, or `None` if there is none, with a warning if it failed."""
        if self._module_maker is None:
            return None
        try:
            program = self._module_maker(module, like)
        except BackendError as error:
            warnings.warn(f"{_PART}: {error}", stacklevel=4)
            return None
        if not isinstance(program, Pending):
            return program
        late = Program[Forward](module, program, _PART)
        self._module_programs.append(late)
        return late

    def _read(
        self,
        blocks: Mapping[int, NodeBlock],
        *,
        keep_logits: bool,
        token_ids: Int64[Tensor, "batch nodes"] | None = None,
    ) -> Tensor:
        """Read blocks; their tokens are those on the device, row by row, where they are given."""
        program = self._program.run if keep_logits and self._cache.is_settled else None
        cache, widths = self._cache, () if program is None else program.widths
        ids, positions, masks = cache.add(blocks, self._form, widths)
        if token_ids is not None:
            ids[:, : token_ids.shape[1]] = token_ids
        start = now()
        with torch.inference_mode():
            try:
                output = self._forward(ids, positions, masks, keep_logits=keep_logits)
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

    def _read_chain(self, row: CacheRow, block: NodeBlock, program: ForwardProgram) -> Tensor:
        """`_read` for a chain after a single text."""
        cache, start = self._cache, now()
        index = cache.index(row.sequence)
        cache.place(slice(index, index + 1), (row.end,), len(block.parents))
        row.nodes.add(block)
        with torch.inference_mode():
            output = program.read_chain(block.token_ids, cache.starts[0], cache)
            if self._states.layers:
                self._states.read({row.sequence: (0, len(block.parents))}, output.states)
            logits = output.logits[0]
        self._forward_s += now() - start
        return logits

    def _use(self, program: ForwardProgram | Pending[ForwardProgram] | None) -> None:
        """Read small blocks by this program from now on, once it is made."""
        is_pending = isinstance(program, Pending)
        run, pending = (None, program) if is_pending else (program, None)
        self._program = Program[ForwardProgram | None](run, pending, self._runs_eagerly)

    def _forward(
        self, token_ids: Tensor, positions: Tensor, masks: Mapping[str, Any], *, keep_logits: bool
    ) -> ForwardOutput:
        """Run the program if it exists and is faster, else the network."""
        program = self._program.run
        if program is not None and self._cache.is_settled:
            places, size = (token_ids, positions, tuple(masks.values())), token_ids.numel()
            if not keep_logits and size <= program.prompt_tokens:
                output = program.read_prompt(*places, self._cache)
                if output is not None:
                    return output
            is_cheap = size * self.vocab_size <= _UNWANTED and not program.widths
            if token_ids.shape[1] <= program.max_nodes and (keep_logits or is_cheap):
                return program(*places, self._cache)
        inputs: dict[str, Any] = {
            "input_ids": token_ids,
            "position_ids": positions,
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            self._cache_keyword: self._cache,
            "use_cache": True,
        }
        if self._chooses_logits and not keep_logits:
            inputs["logits_to_keep"] = 1
        if not self._states.layers:
            return ForwardOutput(logits=self.network(**inputs).logits)
        return self._states.forward(self.network, inputs)

    def _watching_program(
        self, layers: tuple[int, ...]
    ) -> ForwardProgram | Pending[ForwardProgram] | None:
        """Return the program that gives these hidden states, or `None` with a warning."""
        program, name = self._program.run, getattr(self._program.run, "name", None)
        reason = f"a program of kind {name!r} was given that shows none"
        if self._program.pending is None and (program is None or program.layers == layers):
            return program
        if self._program_maker is not None:
            try:
                return self._program_maker(layers)
            except BackendError as error:
                reason = str(error)
        warnings.warn(f"{self._runs_eagerly}: {reason}", stacklevel=4)
        return None

    @property
    def _runs_eagerly(self) -> str:
        if self._states.layers:
            return "hidden states are watched, so every step of the target runs eagerly"
        return "backend 'compiled' is not used, the network runs eagerly"


def _for_few(program: Forward, step: CachedStep) -> Forward:
    return lambda ids, *inputs: (program if ids.numel() <= _ROWS else step)(ids, *inputs)


def make_model_programs(models: Iterable[object]) -> None:
    """Make the pending programs of models and of modules beside them; see `make_programs`."""
    tree_models = (model for model in models if isinstance(model, HfTreeModel))
    make_programs([program for model in tree_models for program in model.programs])


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
