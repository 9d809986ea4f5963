"""A backend runs a network; most replace its forwards over few tree nodes, its steps, by something faster."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.model import SequenceModel
from monge.engine.models.tree_cache import TreeCache
from monge.engine.notices import notify, waiting

Made_co = TypeVar("Made_co", covariant=True)
Notify = Callable[[str], None]
"""Told in a sentence what takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What the inputs of a network's step look like.

    Attributes:
        kinds: Kinds of attention layers, one mask each, in the order of the masks.
        mask_dtype: `torch.bool`, or the float type of an additive mask.
        cache_shapes: `(heads, head_dim)` of keys and values, layer by layer, keys first.
        dtype: Type of keys, values and logits.
        layers: Hidden states that come with the logits, numbered as `FeatureModel` numbers them.
    """

    kinds: tuple[str, ...]
    mask_dtype: torch.dtype
    cache_shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step gives for every node.

    Attributes:
        logits: `[batch, nodes, vocab]`.
        states: Hidden states of the step's layers, `[batch, nodes, hidden]` each.
    """

    logits: Tensor
    states: tuple[Tensor, ...] = ()


@runtime_checkable
class NodeStep(Protocol):
    """Reads a few nodes of every row, once a first forward of the network has laid out the cache.

    Attributes:
        name: What runs, for tables of results.
        layers: Hidden states that it gives.
    """

    name: str
    layers: tuple[int, ...]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> StepOutput:
        """Read nodes; keys and values go where the cache was told to place them.

        Args:
            token_ids: Tokens, `[batch, nodes]`.
            positions: Their positions.
            masks: For every kind of attention layer which columns a node sees, `[batch, 1, nodes,
                seq]`.
            cache: The cache, placed.
        """
        ...


@runtime_checkable
class ChainStep(NodeStep, Protocol):
    """A step that is told of the commonest block, a chain behind one text, without tensors being made for it."""

    def read_chain(self, token_ids: Sequence[int], start: int, cache: TreeCache) -> StepOutput:
        """What a call gives for a chain of one row whose nodes see all columns before them, and themselves.

        Args:
            token_ids: Tokens of the chain.
            start: Column and position of the first of them.
            cache: The cache, placed.
        """
        ...


@runtime_checkable
class PromptStep(NodeStep, Protocol):
    """A step that also reads prompts, of which nobody wants the logits.

    Attributes:
        spec: Shapes of its inputs.
        prompt_tokens: Tokens of all rows that it reads instead of the network; more are the
            network's.
        max_nodes: Nodes a row that it reads instead of the network where logits are wanted.
    """

    spec: StepSpec
    prompt_tokens: int
    max_nodes: int

    def read_prompt(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> StepOutput:
        """What a call gives, with the logits of any one node."""
        ...


@runtime_checkable
class SizedStep(NodeStep, Protocol):
    """A step that reads blocks of a few widths only, so that nothing has to be prepared while decoding goes on.

    Attributes:
        widths: Nodes a row, ascending. Narrower blocks are padded to the next width, wider ones are
            the network's, and so are those of which nobody wants the logits.
    """

    widths: tuple[int, ...]


class Pending(ABC, Generic[Made_co]):
    """A program that is compiled when it is needed, or with others before.

    Attributes:
        expected_s: Seconds that it takes; 0 if the program is stored.
    """

    expected_s: int

    @abstractmethod
    def make(self) -> Made_co:
        """Compile the program, or load the stored one.

        Raises:
            BackendError: If that is not possible here; the message says why.
        """


@runtime_checkable
class PendingHost(Protocol):
    """A model with programs that may be pending."""

    def pending(self) -> Sequence[Pending[Any]]:
        """Programs that are not made yet."""
        ...

    def make_programs(self) -> None:
        """Make them; what cannot be made runs eagerly, with a warning."""
        ...


def make_programs(models: Iterable[object]) -> None:
    """Make the pending programs of models; one message says how long all of them take."""
    hosts = [model for model in models if isinstance(model, PendingHost)]
    seconds = [one.expected_s for host in hosts for one in host.pending() if one.expected_s]
    what, total = "1 program" if len(seconds) == 1 else f"{len(seconds)} programs", sum(seconds)
    if seconds:
        notify(f"compiling {what} for this machine, about {total} s in all; kept for later starts")
    # A program may be needed in the middle of decoding, where tensors cannot be traced.
    with (
        waiting(f"compiling {what}", total) if seconds else nullcontext(),
        torch.inference_mode(mode=False),
    ):
        for host in hosts:
            host.make_programs()


StepMaker = Callable[[tuple[int, ...]], NodeStep | Pending[NodeStep]]
"""Makes the step that gives these hidden states; raises `BackendError` where there is none."""


class Backend(ABC):
    """What runs a network.

    Attributes:
        reads_shards: Whether it runs networks whose weights lie in several processes.
    """

    reads_shards: ClassVar[bool] = False

    @abstractmethod
    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        """The network behind the interface of the loop.

        Trees where it can read them, chains otherwise.

        Args:
            network: A causal language model in evaluation mode.
        """


@runtime_checkable
class _SteppedModel(Protocol):
    """A model that may run its network by a step of a backend."""

    @property
    def step(self) -> NodeStep | None: ...


@runtime_checkable
class NetworkModel(Protocol):
    """A model around a network of `transformers`."""

    @property
    def network(self) -> PreTrainedModel: ...


def backend_of(model: SequenceModel) -> str:
    """Return what runs a model: `eager`, `compiled`, `compiled, int8 weights`, ...

    Rounded weights are part of it, since they change the distribution that is decoded.
    """
    step = model.step if isinstance(model, _SteppedModel) else None
    name = "eager" if step is None else step.name
    # The weights are read off the network: one that cannot be compiled runs eagerly and stays rounded.
    rounded = rounded_weights_of(model)
    return name if rounded is None else f"{name}, {rounded} weights"


def rounded_weights_of(model: SequenceModel) -> str | None:
    """Return the kind of a model's rounded weights, or `None` if it has those of its checkpoint."""
    from monge.engine.backends.packed_linear import WEIGHTS, PackedLinear

    if not isinstance(model, NetworkModel):
        return None
    kinds = {one.weights for one in model.network.modules() if isinstance(one, PackedLinear)}
    # Beside maps of 4 bits there are some of 8.
    coarsest = max(kinds, key=WEIGHTS.index, default="exact")
    return None if coarsest == "exact" else coarsest
