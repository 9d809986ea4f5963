"""The interface of a network: read nodes, and keep a path."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from monge.laws.levels import DrawnTrees, RootDraws
from monge.laws.tree import FutureTree

ModuleForward = Callable[..., tuple[Tensor, ...]]
"""A computation of a module: tensors in, tensors out."""


@runtime_checkable
class Recordable(Hashable, Protocol):
    """A function of tensors that never waits for a number. Equal functions give equal results."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...

    def constants(self, device: torch.device) -> object:
        """Return what it reads besides its inputs."""
        ...


Recorder = Callable[[Recordable, Sequence[Tensor]], Tensor]
"""Runs a `Recordable` on a device, and may record its launches there."""


def launched(function: Recordable, inputs: Sequence[Tensor]) -> Tensor:
    """Run a function as it is; a `Recorder`."""
    return function(*inputs)


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """New nodes of a sequence, to be read in one forward.

    Args:
        tokens: Their tokens, or the tree of which they are all nodes, where a device still draws it.
        parents: For every new node, the index of its parent among the sequence's uncommitted nodes
            (those of earlier blocks and of this block, in reading order); -1 for the last committed
            token.
    """

    tokens: tuple[int, ...] | FutureTree
    parents: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Their tokens; the host waits for a device that still draws them."""
        if not isinstance(self.tokens, FutureTree):
            return self.tokens
        token_ids = self.tokens.result().token_ids
        # Nodes below one whose law was not finite are read, and their logits are not used.
        return (*token_ids, *(0,) * (len(self.parents) - len(token_ids)))

    @classmethod
    def chain(cls, token_ids: Sequence[int], after: int = -1) -> "NodeBlock":
        """A run of tokens, each the child of the token before it; `after` is the first token's parent."""
        first = after + 1
        return cls(tuple(token_ids), (after, *range(first, first + len(token_ids) - 1)))

    def continues(self, count: int) -> bool:
        """Return whether it is a chain whose first node follows the last of `count` uncommitted nodes."""
        return self.parents == tuple(range(count - 1, count - 1 + len(self.parents)))


@runtime_checkable
class SequenceModel(Protocol):
    """A causal network with a cache row per sequence; target and draft model alike.

    A sequence has committed tokens, which stay in the cache, and uncommitted nodes, which `commit`
    keeps or drops.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a logit."""
        ...

    @property
    def max_length(self) -> int | None:
        """Longest sequence in tokens, if bounded."""
        ...

    @property
    def why_no_tree(self) -> str | None:
        """The reason why only chains can be read, or `None` if trees can."""
        ...

    @property
    def why_no_draft(self) -> str | None:
        """The reason why read tokens cannot be taken back, so nothing can be drafted, or `None` if they can."""
        ...

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward since it was made."""
        ...

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        """Start sequences by id; their prefixes (possibly empty) are read and committed."""

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        """Read and commit more tokens of open sequences without uncommitted nodes, as chunked prefill does.

        A model that cannot take tokens back may need the whole prompt in the first chunk.
        """

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        """Read new uncommitted nodes; return the next-token logits of each of them, by sequence."""
        ...

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit these nodes, a path from the last committed token down, and drop the sequence's other uncommitted nodes."""

    def length(self, sequence: int) -> int:
        """Number of committed tokens."""
        ...

    def close(self, sequence: int) -> None:
        """Drop a sequence and free its memory."""


def dtype_of(model: SequenceModel) -> torch.dtype | None:
    """Type of a network's weights and activations, if the network has a `dtype`."""
    return getattr(model, "dtype", None)


def draft_length(model: SequenceModel) -> int | None:
    """Longest text in which read tokens can be taken back, if bounded.

    A model that reads longer texts, but only token by token, has the bound as its `draft_length`.
    """
    bound: int | None = getattr(model, "draft_length", None)
    return model.max_length if bound is None else bound


@runtime_checkable
class WatchedStates(Protocol):
    """Hidden states of committed tokens that a head reads; freed with this object."""

    def take(self, sequence: int) -> Float[Tensor, "tokens width"] | None:
        """Return the hidden states, side by side, of the tokens committed since the last call, or `None`.

        If only the last state is kept, every call returns it.
        """
        ...


class CachedStep(nn.Module, ABC):
    """A step of a head that attends to what it has read; a backend keeps its cache and runs it.

    Attributes:
        embedding: Embeds tokens; `None` for the network's own embeddings, which the backend sets.
        width: Width of the states that it reads.
        cache_shapes: `(heads, head_dim)` of keys and values, layer by layer, keys first.
        windows: Sizes of sliding windows of its layers, each once; `None` is full attention.
        is_traceable: Whether a backend may compile it.
    """

    embedding: Callable[[Tensor], Tensor] | None
    width: int
    cache_shapes: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...]
    is_traceable: bool

    @abstractmethod
    def forward(
        self,
        token_ids: Int64[Tensor, "batch nodes"],
        states: Float[Tensor, "batch nodes width"],
        places: tuple[Tensor, Tensor, Tensor],
        masks: Sequence[Bool[Tensor, "batch one nodes seq"]],
        kept: Sequence[Float[Tensor, "batch _ capacity _"]],
    ) -> tuple[Float[Tensor, "batch nodes hidden"], Float[Tensor, "some vocab"]]:
        """Return the next states, and the logits of the selected states.

        Args:
            token_ids: Tokens of the nodes.
            states: States beside them.
            places: Positions and cache columns, `[batch, nodes]`, and the nodes that get logits, as
                indices of `[batch * nodes]`.
            masks: Columns that every node sees, a mask for each of `windows`.
            kept: Keys and values, changed in place.
        """


@runtime_checkable
class HeadModel(Protocol):
    """A head beside a network: a cache row for each sequence, as in `SequenceModel`."""

    def open(self, sequence: int) -> None:
        """Start a sequence of no tokens."""

    def read(
        self, blocks: Mapping[int, NodeBlock], states: Float[Tensor, "nodes width"]
    ) -> tuple[Float[Tensor, "nodes hidden"], Float[Tensor, "sequences vocab"]]:
        """Read and commit chains; return the next states of all nodes and the logits after each chain.

        Args:
            blocks: The chains.
            states: States beside their tokens, block after block.
        """
        ...

    def extend(
        self, blocks: Mapping[int, NodeBlock], states: Float[Tensor, "nodes width"]
    ) -> tuple[Float[Tensor, "nodes hidden"], Float[Tensor, "nodes vocab"]]:
        """Read new uncommitted nodes; return the next state and the logits of each, block after block."""
        ...

    def draw_trees(
        self, draws: RootDraws, states: Mapping[int, Float[Tensor, "one hidden"]]
    ) -> DrawnTrees:
        """Draw trees as a `LevelModel` does; the head's states at the roots are given too."""
        ...

    def drop(self, sequence: int) -> None:
        """Drop the uncommitted nodes of a sequence."""

    def close(self, sequence: int) -> None:
        """Drop a sequence and free its memory."""


@runtime_checkable
class FeatureModel(SequenceModel, Protocol):
    """A network that also shows its hidden states, taken from the forwards that it runs anyway.

    Its backend runs small modules beside it, such as the steps of a head.

    Hidden states are numbered as `transformers` numbers them: 0 is the embedding's output, i the
    output of layer i. The last state, `num_layers`, is what the output layer reads, after the final
    norm.
    """

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        ...

    @property
    def num_layers(self) -> int:
        """Index of the last hidden state."""
        ...

    def watch(self, layers: Sequence[int], *, only_last: bool = False) -> WatchedStates:
        """Keep these hidden states from now on, beside those of earlier calls; before any sequence is open.

        Args:
            layers: Their indices.
            only_last: Keep that of the last committed token only.

        Raises:
            OptionError: If an index is out of range.
        """
        ...

    def unembed(self, states: Float[Tensor, "nodes hidden"]) -> Float[Tensor, "nodes vocab"]:
        """Logits that the network's output layer gives to last hidden states."""
        ...

    def embed(
        self, token_ids: Sequence[int] | Int64[Tensor, " nodes"]
    ) -> Float[Tensor, "nodes hidden"]:
        """The network's embeddings of tokens, which may lie on its device."""
        ...

    def module_forward(self, module: nn.Module, like: Sequence[Tensor]) -> ModuleForward:
        """Return the backend's forward of a module, or the module itself with a warning.

        Args:
            module: In evaluation mode; takes matrices with a row per node, and returns a tuple of
                such matrices.
            like: Inputs of the widths and types that will come; the number of rows is free.
        """
        ...

    def head_model(self, read: CachedStep, step: CachedStep) -> HeadModel:
        """Return a head with a cache, compiled by the backend.

        Args:
            read: Reads committed tokens and the network's states.
            step: Reads drafted tokens and the head's own states; keeps the same keys and values.
        """
        ...

    def pack_module(self, module: nn.Module) -> None:
        """Store the matrices of a module beside the network in the backend's fastest form, in place.

        They may be rounded, so this is for modules that only draft. A backend without such a form
        changes nothing.

        Args:
            module: In evaluation mode.
        """


@runtime_checkable
class PreparedModel(SequenceModel, Protocol):
    """A network that can be compiled or captured before there is a text."""

    def prepare(self, num_rows: int, num_nodes: int, *, drafts: bool = False) -> None:
        """Capture the forwards of up to `num_rows` sequences with `num_nodes` nodes each, and of drafts.

        Nothing is done while sequences are open, or if the forward takes blocks of all sizes.
        """


@runtime_checkable
class LevelModel(SequenceModel, Protocol):
    """A network on a device that draws trees itself, so that the host waits for all levels once."""

    def draw_trees(self, draws: RootDraws) -> DrawnTrees:
        """Draw trees below the last committed tokens, and read all levels but the last.

        Whether it raises must not depend on what it draws, since the same uniforms then serve the
        rest of the text.

        Args:
            draws: What they are drawn from, by sequence.
        """
        ...


@runtime_checkable
class ForeignModel(SequenceModel, Protocol):
    """A draft model with another tokenizer, seen through the target's tokens.

    `open` and `append` leave out a text that is too long in its own tokens; see `reach`.
    """

    def reach(self, sequence: int, text: Sequence[int], *, mixed: bool = False) -> int | None:
        """Return the length, in the target's tokens, up to which it can read any continuation of a text.

        Args:
            sequence: The sequence.
            text: Its committed text.
            mixed: Whether tokens follow that it does not share.

        Returns:
            The length, less than the text's if it cannot read that; `None` if unbounded.
        """
        ...

    def continuations(self, counts: Mapping[int, int]) -> Mapping[int, tuple[int, ...]]:
        """Return its greedy continuation of the committed text of sequences, spelled in the target's tokens.

        Args:
            counts: Number of its own tokens to write, by sequence; the last committed token of each
                was read by `extend`.
        """
        ...
