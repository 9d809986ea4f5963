"""Forwards of networks and of modules: eager until a backend has compiled them."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError, UnsupportedModelError
from monge.laws.levels import DrawnLevels, LevelDraws
from monge.networks.background_compiler import is_compiled_elsewhere
from monge.networks.base import Recorder, SequenceModel
from monge.networks.network_facts import (
    WEIGHTS,
    PackedLayer,
    cache_keyword,
    chooses_logits,
    packed_layers,
)
from monge.networks.network_state import NetworkState
from monge.networks.tree_cache import TreeCache
from monge.runtime.clock import note_preparation
from monge.runtime.notices import notify, waiting

_UNWANTED: Final = 1 << 20
"""Most logits that a compiled forward may compute without need, for a short prompt and a small vocabulary."""
MAX_ROWS: Final = 64
"""Rows that the compiled forward of a module reads: with more, arithmetic counts, and the module does as well."""

Run = TypeVar("Run", bound=Callable[..., Any])


class Forward(Generic[Run]):
    """The forward of a network or of a module: eager until a backend has compiled it.

    Args:
        run: What runs at first: the network or module itself, or what a backend has made of it.
        make: Compiles what runs from then on, or loads it from the cache. Raises `BackendError` if
            neither can be done. `None` if nothing is to be made.
        expected_s: Seconds that `make` takes at present; 0 if the compiled code is stored.

    Attributes:
        run: What runs now.
        warning: Start of the warning if it cannot be compiled; the reason follows.
    """

    warning = "part of a head runs eagerly"

    def __init__(
        self,
        run: Run,
        make: Callable[[], Run] | None = None,
        expected_s: Callable[[], int] = lambda: 0,
    ) -> None:
        self.run, self.make, self.expected_s = run, make, expected_s

    def __call__(self, *inputs: Any) -> Any:
        """Run it, compiled first unless another process compiles it."""
        if self.make is not None:
            make_ready([self])
        return self.run(*inputs)

    @property
    def is_ready(self) -> bool:
        """True if what runs now runs for good."""
        return self.make is None


def make_ready(forwards: Iterable[Forward[Any]]) -> None:
    """Compile the forwards that are not ready. A message says how long all of them take.

    What cannot be compiled stays eager, with a warning.
    """
    pending = [(forward, forward.make) for forward in forwards if forward.make is not None]
    seconds = [forward.expected_s() for forward, _ in pending]
    if not pending or is_compiled_elsewhere(seconds):
        return
    note_preparation()
    count, total = sum(map(bool, seconds)), sum(seconds)
    what = "compiling 1 module" if count == 1 else f"compiling {count} modules"
    if count:
        notify(f"{what} for this machine, about {total} s in all; kept for later starts")
    # Nothing is traced in inference mode.
    with waiting(what, total) if count else nullcontext(), torch.inference_mode(mode=False):
        for forward, make in pending:
            try:
                forward.run = make()
            except BackendError as error:
                warnings.warn(f"{forward.warning}: {error}", stacklevel=3)
            forward.make = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSpec:
    """Shapes and types of the inputs of a network's forward.

    Attributes:
        kinds: Kinds of attention layers, in the order of the masks; each kind has a mask.
        windows: Sliding window of each kind; `None` where a layer sees all tokens.
        mask_dtype: `torch.bool`, or the float type of an additive mask.
        cache_shapes: `(heads, head_dim)` of keys and values, layer by layer, keys first.
        dtype: Type of keys, values and logits.
    """

    kinds: tuple[str, ...]
    windows: tuple[int | None, ...]
    mask_dtype: torch.dtype
    cache_shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Output of a forward for every node.

    Attributes:
        logits: `[batch, nodes, vocab]`.
        states: Hidden states of the forward's layers, `[batch, nodes, hidden]` each.
    """

    logits: Tensor
    states: tuple[Tensor, ...] = ()


class NetworkForward:
    """The forward of a network over the nodes of trees: as `transformers` runs it, or a subclass of a backend.

    Args:
        network: The network; another network may be put in its place.
        layers: Hidden states that come with the logits, numbered as `FeatureModel` numbers them.

    Attributes:
        name: Name of the backend, for tables of results.
        widths: Numbers of nodes a row, ascending, if it takes no others. Narrower blocks are padded
            to the next width, and `prepare` is called before decoding.
        prompt_tokens: Tokens of all rows of a prompt that `read_prompt` of a `FastForward` reads.
        max_nodes: Nodes a row that it reads; the network itself reads larger blocks.
        copied_bytes: Memory of weights that it holds beside those of the network.
        reads_chains: True if it has `read_chain`.
        record: Captures other functions beside the network, if the backend does that.
    """

    name: ClassVar[str] = "eager"
    widths: ClassVar[tuple[int, ...]] = ()
    reads_chains: ClassVar[bool] = False

    prompt_tokens: int = 0
    copied_bytes: int = 0
    max_nodes: int = 64
    record: Recorder | None = None

    def __init__(self, network: PreTrainedModel, layers: tuple[int, ...] = ()) -> None:
        self.network, self.layers = network, layers
        self._cache_keyword, self._chooses_logits = cache_keyword(network), chooses_logits(network)
        self._num_layers = int(network.config.get_text_config().num_hidden_layers)
        self._shows_last = layers == (self._num_layers,)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor | None,
        masks: Mapping[str, Any],
        cache: Any,
        *,
        keep_logits: bool = True,
    ) -> ForwardOutput:
        """Read nodes; write keys and values to the columns that the cache has placed.

        Args:
            token_ids: Tokens, `[batch, nodes]`.
            positions: Their positions; `None` for the order of the tokens.
            masks: For every kind of attention layer which columns a node sees, `[batch, 1, nodes,
                seq]`; empty if a node sees all columns before it.
            cache: The cache, placed.
            keep_logits: Whether logits of all nodes are needed; else those of any node will do.
        """
        inputs: dict[str, Any] = {
            "input_ids": token_ids,
            self._cache_keyword: cache,
            "use_cache": True,
        }
        if positions is not None:
            inputs["position_ids"] = positions
        if masks:
            inputs["attention_mask"] = masks if len(masks) > 1 else next(iter(masks.values()))
        if self._chooses_logits and not keep_logits:
            inputs["logits_to_keep"] = 1
        if self.layers:
            return self._with_states(inputs)
        return ForwardOutput(logits=self.network(**inputs).logits)

    def follow(self, network: PreTrainedModel) -> bool:
        """Take the weights that a network has now; return whether this can be done."""
        self.network = network
        return True

    def lay_out(self, cache: TreeCache) -> None:
        """Lay out the cache, so that the first prompt needs no forward of the network; by default, do nothing."""

    def prepare(
        self, num_rows: int, num_nodes: int, cache: TreeCache, *, drafts: bool = False
    ) -> None:
        """Prepare for blocks of up to this number of rows and of nodes a row; by default, do nothing.

        Args:
            num_rows: Texts that are decoded together.
            num_nodes: Most nodes of a text.
            cache: The cache, without texts.
            drafts: Whether `draw_levels` will be called too.
        """

    def draw_levels(
        self, given: LevelDraws, rows: slice, lengths: Sequence[int], cache: TreeCache
    ) -> DrawnLevels | None:
        """Draw and read trees as `laws.levels.draw_levels` does; `None`, as by default, leaves it to the caller.

        Args:
            given: What the trees are drawn from, row by row.
            rows: Rows of the cache.
            lengths: Their committed tokens.
            cache: The cache.
        """
        return None

    def read_chain(self, token_ids: Sequence[int], start: int, cache: TreeCache) -> ForwardOutput:
        """Read a chain of a single row, whose nodes see all columns before them, and themselves.

        Only forwards with `reads_chains` have it.

        Args:
            token_ids: Tokens of the chain, as Python integers.
            start: Column and position of the first of them.
            cache: The cache, placed.
        """
        raise NotImplementedError

    def _with_states(self, inputs: Mapping[str, Any]) -> ForwardOutput:
        """Run the network and return the hidden states too.

        For all states, `transformers` hooks every layer; in small networks that takes longer than a
        layer. The last state alone needs only a hook on the decoder.
        """
        if self._shows_last:
            seen: list[Tensor] = []
            hook = self.network.get_decoder().register_forward_hook(
                lambda _module, _inputs, output: seen.append(output[0])
            )
            try:
                logits = self.network(**inputs).logits
            finally:
                hook.remove()
            if seen:
                return ForwardOutput(logits=logits, states=tuple(seen))
            # It calls its layers itself; the same columns are written again.
            self._shows_last = False
        output = self.network(**inputs, output_hidden_states=True)
        states = output.hidden_states
        if len(states) <= self._num_layers:  # layers that read only images show none
            raise UnsupportedModelError(
                f"{type(self.network).__name__} gives {len(states)} hidden states for "
                f"{self._num_layers} layers, so they cannot be told apart; use another drafter "
                "than a head"
            )
        kept = tuple(states[layer] for layer in self.layers)
        return ForwardOutput(logits=output.logits, states=kept)


class FastForward(NetworkForward, ABC):
    """A forward that a backend has made of a network; the network itself reads what it does not.

    Args:
        eager: The network.
        spec: Shapes and types of its inputs.
    """

    def __init__(self, eager: NetworkForward, spec: ForwardSpec) -> None:
        super().__init__(eager.network, eager.layers)
        self.spec = spec
        self._vocab_size = int(eager.network.config.get_text_config().vocab_size)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Any,
        masks: Mapping[str, Any],
        cache: Any,
        *,
        keep_logits: bool = True,
    ) -> ForwardOutput:
        if cache.is_settled:
            places, size = (token_ids, positions, tuple(masks.values())), token_ids.numel()
            if not keep_logits and size <= self.prompt_tokens:
                output = self.read_prompt(*places, cache)
                if output is not None:
                    return output
            is_cheap = size * self._vocab_size <= _UNWANTED and not self.widths
            if token_ids.shape[1] <= self.max_nodes and (keep_logits or is_cheap):
                return self.read(*places, cache)
        return super().__call__(token_ids, positions, masks, cache, keep_logits=keep_logits)

    def follow(self, network: PreTrainedModel) -> bool:
        return False

    @abstractmethod
    def read(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput:
        """Read up to `max_nodes` nodes of every row; the arguments are those of a call."""

    def read_prompt(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput | None:
        """Read tokens of prompts. Return logits of any node; `None` leaves them to the network."""
        return None


ForwardMaker = Callable[[NetworkForward], Forward[NetworkForward]]
"""Makes the forward of a backend for a network; raises `BackendError` if there is none."""


@runtime_checkable
class NetworkModel(Protocol):
    """A model around a network of `transformers`."""

    @property
    def network(self) -> PreTrainedModel: ...


class SourceWeights:
    """Finds changes to a network if a backend runs its weights in another form.

    `check` compares a `NetworkState`. `has_changed` also compares a number of every row and column,
    to find writes that torch does not count. A write of only a few numbers may not be seen.

    Args:
        network: The network.
        backend: The backend, for the message.
        are_copied: Whether the backend copied the numbers; else only their addresses matter.
        copy: Makes the network that runs in its place; `None` if the network itself runs.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        backend: str,
        *,
        are_copied: bool,
        copy: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
    ) -> None:
        self._network, self._backend, self._are_copied = network, backend, are_copied
        self._copy = copy
        self._seen = self.state()

    def has_changed(self, state: object) -> bool:
        """Return whether `state` differs from the state when the network was copied."""
        return state != self._seen

    def check(self) -> None:
        """Refuse to go on with copies of weights that were changed.

        Numbers are not compared: every text would wait for that.

        Raises:
            BackendError: If the network has other weights or layers than when it was copied.
        """
        if self._places() != self._seen[0]:
            raise BackendError(
                f"{type(self._network).__name__} was changed after it was loaded: backend "
                f"{self._backend!r} still has the weights of that time; call "
                "decoder.update_weights(), or use backend='eager'"
            )

    def renew(self) -> PreTrainedModel:
        """Return the network that is to run from now on, with the weights of now."""
        self._seen = self.state()
        return self._network if self._copy is None else self._copy(self._network)

    def state(self) -> tuple[NetworkState, bytes]:
        """Return what differs after a change."""
        return self._places(), self._samples() if self._are_copied else b""

    def _places(self) -> NetworkState:
        return NetworkState(self._network, counts_writes=self._are_copied)

    def _samples(self) -> bytes:
        """A number of every row and column of matrices, and all of vectors."""
        tensors = [
            tensor
            for module in self._network.modules()
            if not isinstance(module, PackedLayer)  # those of a file never change
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and tensor.numel()
        ]
        if not tensors:
            return b""
        with torch.inference_mode():
            parts = [tensor.reshape(-1)[:: _stride(tensor)] for tensor in tensors]
            return torch.cat([part.to("cpu", torch.float64) for part in parts]).numpy().tobytes()


def _stride(tensor: Tensor) -> int:
    """Return a stride that meets every row and column: it has no common divisor with the columns."""
    columns = tensor.shape[-1] if tensor.ndim > 1 else 1
    steps = range(min(tensor.numel() // columns, columns - 1), 0, -1)
    return next((step for step in steps if gcd(step, columns) == 1), 1)


@runtime_checkable
class CopyingModel(Protocol):
    """A model that may run copies of its network's weights."""

    source: SourceWeights | None

    def update_weights(self) -> None:
        """Follow weights of the network that were changed: copies are made again, and kept texts are dropped.

        Raises:
            MongeError: If texts are open.
        """
        ...


def backend_of(model: SequenceModel) -> str:
    """Return the backend of a model: `eager`, `compiled`, `compiled, file weights`, `compiled, int8 weights`, ...

    Such weights are part of it, since they change the distribution that is decoded.
    """
    forward: NetworkForward | None = getattr(model, "forward", None)
    name = "eager" if forward is None else forward.name
    # A network that cannot be compiled runs eagerly and stays rounded.
    rounded = rounded_weights_of(model)
    return name if rounded is None else f"{name}, {rounded} weights"


def rounded_weights_of(model: SequenceModel) -> str | None:
    """Return the kind of a model's packed weights, or `None` if it has those of its checkpoint.

    It is `file` for the types of a GGUF file, whose numbers are kept while inputs are rounded.
    """
    if not isinstance(model, NetworkModel):
        return None
    kinds = {layer.weights for layer in packed_layers(model.network)}
    # Beside layers of 4 bits there are some of 8.
    coarsest = max(kinds, key=WEIGHTS.index, default="exact")
    return None if coarsest == "exact" else coarsest
