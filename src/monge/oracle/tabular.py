"""Networks that are tables: small, exact, and fast enough to be enumerated."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.core.errors import MongeError
from monge.networks.base import CachedStep, ModuleForward, NodeBlock
from monge.networks.head_model import CachedHead
from monge.networks.hidden_states import HiddenStateLog, HiddenStates
from monge.networks.prefix_cache import KeyValues, PrefixCache

Style = Literal["positive", "sparse", "ties"]


LawTable = Callable[[tuple[int, ...]], Sequence[float]]
"""Masses of the next token after any text."""


class RandomTable:
    """Reproducible laws: a different law after every text.

    Args:
        vocab_size: Number of tokens.
        seed: Tables of different seeds are unrelated.
        style: `positive` masses, some exact zeros (`sparse`), or masses that repeat (`ties`).
    """

    def __init__(self, vocab_size: int, seed: int, style: Style = "positive") -> None:
        self._vocab_size, self._seed, self._style = vocab_size, seed, style
        self._made: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, token_ids: tuple[int, ...]) -> Sequence[float]:
        if token_ids not in self._made:
            self._made[token_ids] = self._make(token_ids)
        return self._made[token_ids]

    def _make(self, token_ids: tuple[int, ...]) -> list[float]:
        digest = hashlib.blake2b(
            repr((self._seed, token_ids)).encode(), digest_size=2 * self._vocab_size
        ).digest()
        units = [
            int.from_bytes(digest[2 * i : 2 * i + 2], "big") / 65536
            for i in range(self._vocab_size)
        ]
        if self._style == "ties":
            weights = [float(1 + int(3 * unit)) for unit in units]
        else:
            weights = [0.05 + unit * unit for unit in units]
            if self._style == "sparse":
                dropped = int(units[0] * self._vocab_size)
                weights[dropped] = 0.0
        total = math.fsum(weights)
        return [weight / total for weight in weights]


class TabularModel:
    """A `FeatureModel` whose logits are the logarithms of a table.

    Its hidden states are these logits, at every layer.

    Args:
        table: Masses of the next token after any text.
        vocab_size: Number of tokens.
        max_length: Longest text, if bounded.
    """

    why_no_tree: str | None = None
    why_no_draft: str | None = None
    forward_s = 0.0

    def __init__(self, table: LawTable, vocab_size: int, max_length: int | None = None) -> None:
        self.table, self.vocab_size, self.max_length = table, vocab_size, max_length
        self._committed: dict[int, tuple[int, ...]] = {}
        self._nodes: dict[int, list[tuple[int, ...]]] = {}
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self.hidden_size, self.num_layers = vocab_size, 1
        self._states = HiddenStates(self.num_layers)
        self._prefixes: PrefixCache | None = None

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        for sequence in prefixes:
            if sequence in self._committed:
                raise MongeError(f"tabular model: sequence {sequence} is open already")
            self._committed[sequence] = ()
            self._nodes[sequence] = []
        self.append(prefixes)

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        for sequence, given in pieces.items():
            tokens, prefixes = given, self._prefixes
            if self._nodes[sequence]:
                raise MongeError(
                    f"tabular model: sequence {sequence} has uncommitted nodes; "
                    "commit before reading on"
                )
            if prefixes is not None:
                tokens = prefixes.unread(self, sequence, given)
            if tokens:
                self._read(sequence, NodeBlock.chain(tokens))
                self.commit({sequence: range(len(tokens))})

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        return {sequence: self._read(sequence, block) for sequence, block in blocks.items()}

    @property
    def prefixes(self) -> PrefixCache | None:
        """See `PrefixModel`; a token is all that is kept of itself, beside its hidden states."""
        return self._prefixes

    @prefixes.setter
    def prefixes(self, prefixes: PrefixCache | None) -> None:
        self._prefixes = prefixes
        self._states.archive(is_wanted=prefixes is not None)

    @property
    def bytes_per_token(self) -> int:
        return 8 * (1 + self.hidden_size * len(self._states.layers))

    @property
    def weights_version(self) -> int:
        return id(self.table)

    def is_complete(self, sequence: int) -> bool:
        if sequence not in self._committed:
            return False
        return self._states.is_complete(sequence, self.length(sequence))

    def save(self, sequence: int, start: int, stop: int) -> KeyValues:
        tokens = torch.tensor(self._committed[sequence][start:stop])[:, None]
        return (tokens, *self._states.save(sequence, start, stop))

    def load(self, sequence: int, kept: Sequence[KeyValues]) -> None:
        tokens, *states = (torch.cat(parts) for parts in zip(*kept, strict=True))
        self._committed[sequence] = tuple(tokens.flatten().tolist())
        for state in states:
            self._states.load(sequence, state)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        for sequence, path in paths.items():
            nodes = self._nodes[sequence]
            for earlier, later in zip(path, list(path)[1:], strict=False):
                if nodes[later][:-1] != nodes[earlier]:
                    raise MongeError(
                        f"tabular model: node {later} is no child of node {earlier}; a path is "
                        "committed from the top"
                    )
            if path:
                self._committed[sequence] = nodes[path[-1]]
            self._nodes[sequence] = []
        self._states.commit(paths)

    def length(self, sequence: int) -> int:
        return len(self._committed[sequence])

    def text(self, sequence: int) -> tuple[int, ...]:
        """Committed tokens, which a real cache does not hold."""
        return self._committed[sequence]

    def close(self, sequence: int) -> None:
        del self._committed[sequence], self._nodes[sequence]
        self._states.close(sequence)

    def watch(self, layers: Sequence[int], *, only_last: bool = False) -> HiddenStateLog:
        return self._states.watch(layers, only_last=only_last)

    def unembed(self, states: Float[Tensor, "nodes hidden"]) -> Float[Tensor, "nodes vocab"]:
        return states

    def embed(
        self, token_ids: Sequence[int] | Int64[Tensor, " nodes"]
    ) -> Float[Tensor, "nodes hidden"]:
        return torch.eye(self.vocab_size, dtype=torch.float64)[list(map(int, token_ids))]

    def module_forward(self, module: torch.nn.Module, like: Sequence[Tensor]) -> ModuleForward:
        return module

    def head_model(self, read: CachedStep, step: CachedStep) -> CachedHead:
        for module in (read, step):
            if module.embedding is None:
                module.embedding = lambda token_ids: self.embed(token_ids.tolist())
        return CachedHead(read, step, step, self.embed((0,)))

    def pack_module(self, module: torch.nn.Module) -> None:
        """Leave it as it is."""

    def _read(self, sequence: int, block: NodeBlock) -> Tensor:
        nodes = self._nodes[sequence]
        first = len(nodes)
        for token, parent in zip(block.token_ids, block.parents, strict=True):
            above = self._committed[sequence] if parent < 0 else nodes[parent]
            nodes.append((*above, token))
        logits = torch.stack([self._logits_after(text) for text in nodes[first:]])
        layers = len(self._states.layers)
        self._states.read({sequence: (0, len(logits))}, [logits[None]] * layers)
        return logits

    def _logits_after(self, text: tuple[int, ...]) -> Tensor:
        if text not in self._logits:
            self._logits[text] = torch.tensor(list(self.table(text)), dtype=torch.float64).log()
        return self._logits[text]
