"""Programs that replace forwards of a network over few tree nodes."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.core.levels import DrawnLevels, LevelDraws
from monge.core.model import SequenceModel
from monge.engine.clock import note_preparation
from monge.engine.models.background_compiler import is_compiled_elsewhere
from monge.engine.models.network_facts import WEIGHTS, PackedLayer, packed_layers
from monge.engine.models.network_state import NetworkState
from monge.engine.models.tree_cache import TreeCache
from monge.engine.notices import notify, waiting
from monge.verify.problem import Recorder

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """Shapes and types of a program's inputs.

    Attributes:
        kinds: Kinds of attention layers, in the order of the masks; each kind has a mask.
        windows: Sliding window of each kind; `None` where a layer sees all tokens.
        mask_dtype: `torch.bool`, or the float type of an additive mask.
        cache_shapes: `(heads, head_dim)` of keys and values, layer by layer, keys first.
        dtype: Type of keys, values and logits.
        layers: Hidden states that come with the logits, numbered as `FeatureModel` numbers them.
    """

    kinds: tuple[str, ...]
    windows: tuple[int | None, ...]
    mask_dtype: torch.dtype
    cache_shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Output of a forward for every node.

    Attributes:
        logits: `[batch, nodes, vocab]`.
        states: Hidden states of the program's layers, `[batch, nodes, hidden]` each.
    """

    logits: Tensor
    states: tuple[Tensor, ...] = ()


class ForwardProgram(ABC):
    """Reads a few nodes of every row instead of the network.

    Attributes:
        name: Name of the program, for tables of results.
        spec: Shapes and types of its inputs.
        max_nodes: Nodes a row that it reads; larger blocks are the network's.
        widths: Numbers of nodes a row, ascending, if it takes no others. Narrower blocks are padded
            to the next width, and `prepare` is called before decoding.
        reads_prompts: True if it reads prompts without a first forward of the network, which lays
            out the cache.
        copied_bytes: Memory of weights that it holds beside those of the network.
        prompt_tokens: Tokens of all rows that `read_prompt` reads; more are the network's.
        reads_chains: True if it has `read_chain`.
        record: Runs other functions beside the network, if the backend records them.
    """

    name: ClassVar[str]
    widths: ClassVar[tuple[int, ...]] = ()
    reads_prompts: ClassVar[bool] = False
    reads_chains: ClassVar[bool] = False

    spec: ProgramSpec
    max_nodes: int = 64
    prompt_tokens: int = 0
    copied_bytes: int = 0
    record: Recorder | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden states that come with the logits."""
        return self.spec.layers

    def follow(self, network: PreTrainedModel) -> bool:
        """Take the weights that the network has now; return whether this can be done."""
        return False

    @abstractmethod
    def __call__(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput:
        """Read nodes; write keys and values to the columns that the cache has placed.

        Args:
            token_ids: Tokens, `[batch, nodes]`.
            positions: Their positions.
            masks: For every kind of attention layer which columns a node sees, `[batch, 1, nodes,
                seq]`.
            cache: The cache, placed.
        """

    def prepare(  # noqa: B027
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
        self,
        given: LevelDraws,
        rows: slice,
        lengths: Sequence[int],
        cache: TreeCache,
    ) -> DrawnLevels | None:
        """Draw and read trees as `core.levels.draw_levels` does; `None`, as by default, leaves it to the caller.

        Args:
            given: What the trees are drawn from, row by row.
            rows: Rows of the cache.
            lengths: Their committed tokens.
            cache: The cache.
        """
        return None

    def read_prompt(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput | None:
        """Read tokens of prompts. Return logits of any node; `None` leaves them to the network."""
        return None

    def read_chain(self, token_ids: Sequence[int], start: int, cache: TreeCache) -> ForwardOutput:
        """Read a chain of a single row, whose nodes see all columns before them, and themselves.

        Args:
            token_ids: Tokens of the chain, as Python integers.
            start: Column and position of the first of them.
            cache: The cache, placed.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Pending(Generic[Made]):
    """A program of a network or of a module, made when it is needed or with other programs.

    Args:
        make: Compiles the program, or loads the stored program; raises `BackendError` if it can do
            neither here.
        expected_s: Seconds that it takes; 0 if the program is stored, now or by another process.
    """

    make: Callable[[], Made]
    expected_s: Callable[[], int]


class Program(Generic[Made]):
    """A program, and what runs in its place until it is made, or for good if it cannot be made.

    Args:
        eager: What runs without the program.
        pending: Makes the program; `None` if there is none, or if `eager` is the program.
        warning: Start of the warning if the program cannot be made; the reason follows.

    Attributes:
        run: What runs now.
        pending: What is still to be made, if anything.
    """

    def __init__(self, eager: Made, pending: Pending[Any] | None = None, warning: str = "") -> None:
        self.run, self.pending, self._warning = eager, pending, warning

    def __call__(self, *inputs: Any) -> Any:
        """Run the program, which is made now unless another process compiles it."""
        make_programs([self])
        run: Any = self.run
        return run(*inputs)

    def make(self) -> None:
        """Make the program, within `compiling`."""
        if self.pending is not None:
            try:
                self.run = self.pending.make()
            except BackendError as error:
                warnings.warn(f"{self._warning}: {error}", stacklevel=4)
            self.pending = None


def make_programs(programs: Iterable[Program[Any]]) -> None:
    """Make the programs that are pending. A message says how long all of them take.

    Whatever cannot be made runs eagerly, with a warning.
    """
    waiting = [program for program in programs if program.pending is not None]
    seconds = [program.pending.expected_s() for program in waiting if program.pending is not None]
    if waiting and not is_compiled_elsewhere(seconds):
        with compiling(seconds):
            for program in waiting:
                program.make()


@contextmanager
def compiling(seconds: Sequence[int]) -> Iterator[None]:
    """Announce programs by the seconds that each takes, and leave inference mode, in which nothing is traced."""
    note_preparation()
    needed = [duration for duration in seconds if duration]
    what, total = "1 program" if len(needed) == 1 else f"{len(needed)} programs", sum(needed)
    if needed:
        notify(f"compiling {what} for this machine, about {total} s in all; kept for later starts")
    with (
        waiting(f"compiling {what}", total) if needed else nullcontext(),
        torch.inference_mode(mode=False),
    ):
        yield


ProgramMaker = Callable[[tuple[int, ...]], ForwardProgram | Pending[ForwardProgram]]
"""Makes the program that gives these hidden states; raises `BackendError` if there is none."""


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
class FollowingProgram(Protocol):
    """A program of a module that copied its weights."""

    def follow(self) -> None:
        """Take the weights that the module has now."""
        ...


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
    program: ForwardProgram | None = getattr(model, "program", None)
    name = "eager" if program is None else program.name
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
