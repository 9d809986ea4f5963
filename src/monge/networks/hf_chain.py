"""A `transformers` network that reads chains only: positions from token order, or recurrent state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from monge.core.errors import MongeError, UnsupportedModelError
from monge.networks.base import NodeBlock
from monge.networks.hf_model import HfModel
from monge.networks.network_facts import (
    forward_parameters,
    num_weights,
    own_cache,
    why_no_rollback,
    why_no_tree,
)
from monge.runtime.clock import now

_PREFILL: Final = 1024
_MOST_UNREAD: Final = 16
"""Most accepted tokens that are read again with each round; more get a forward of their own."""
_TRIAL: Final = -1
"""Name of the sequence that `_trial_logits` reads."""
_TRIAL_PROMPT, _TRIAL_BLOCK = 30, 8
"""Tokens of the prompt of a trial, and of the block that follows."""


class CacheSnapshot:
    """A state of a cache, to return to.

    Keys and values of full attention grow with the text, and are cropped. Recurrent states and
    windows have a fixed size, and are copied.
    """

    @torch.inference_mode()
    def __init__(self, cache: DynamicCache) -> None:
        self._lengths = [
            layer.get_seq_length() if _grows(layer) else None for layer in cache.layers
        ]
        self._copies: list[dict[str, Any]] = [
            {
                name: deepcopy(value)
                for name, value in vars(layer).items()
                if not (_grows(layer) and name in {"keys", "values"})
            }
            for layer in cache.layers
        ]

    @torch.inference_mode()
    def restore(self, cache: DynamicCache) -> None:
        """Return to this state, once; also after a forward that failed between two layers."""
        for layer, length, copied in zip(cache.layers, self._lengths, self._copies, strict=True):
            if _grows(layer) and (added := layer.get_seq_length() - (length or 0)):
                DynamicLayer.crop(layer, -added)
            vars(layer).update(copied)


def _grows(layer: object) -> TypeGuard[DynamicLayer]:
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


@dataclass(slots=True)
class _ChainRow:
    """The state of a sequence.

    Args:
        cache: Holds the tokens that were read: the committed tokens but for `unread`, and
            `drafted`.
        length: Number of committed tokens.
        unread: The last committed tokens, if the cache had to return to the state before them.
        drafted: Tokens read in this round, none of them committed.
        snapshot: State of the cache at the start of the round, if tokens cannot be cropped.
    """

    cache: DynamicCache
    length: int = 0
    unread: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    snapshot: CacheSnapshot | None = None


class HfChainModel(HfModel):
    """Reads chains. Each forward reads one sequence, which has its own cache.

    For networks that cannot read trees. ALiBi models, whose positions are the order of the tokens,
    roll back by cropping their cache. A recurrent state cannot be cropped: it is copied before a
    round, restored if tokens are rejected, and the accepted tokens are read again at the start of
    the next round, in the same forward. Networks that cannot continue from their cache with several
    tokens at once decode without speculation; a forward of a few tokens decides.

    Args:
        model: A causal language model in evaluation mode.

    Raises:
        UnsupportedModelError: If it is not causal, or cannot continue from a cache token by token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._takes_position_ids = "position_ids" in forward_parameters(model)
        self._rows: dict[int, _ChainRow] = {}
        self.why_no_tree = why_no_tree(model)
        self.why_no_draft: str | None = None
        self._crops = why_no_rollback(model) is None
        try:
            self._trial_logits(3, (1,))
        except Exception as error:
            name = type(model).__name__
            raise UnsupportedModelError(
                f"{name} cannot read a token behind its cache: {_in_words(error)}"
            ) from error
        self.why_no_draft = self._why_no_chain()

    def __repr__(self) -> str:
        size = num_weights(self.network) / 1e6
        return f"HfChainModel({type(self.network).__name__}, {size:.1f}M parameters, {self.dtype})"

    @property
    def num_open(self) -> int:
        return len(self._rows)

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        if self.source is not None:
            self.source.check()
        self._rows |= {sequence: self._new_row() for sequence in prefixes}
        self.append(prefixes)

    def _new_row(self) -> _ChainRow:
        # Without a config every layer keeps all it read: one that keeps only its window could not
        # take tokens back.
        return _ChainRow(DynamicCache() if self._crops else own_cache(self.network))

    def _append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        for sequence, tokens in pieces.items():
            # Some recurrent layers start from nothing whenever they read several tokens: they read
            # the prompt whole.
            size = _PREFILL if self.why_no_draft is None else max(len(tokens), 1)
            for start in range(0, len(tokens), size):
                part = tokens[start : start + size]
                self._read(self._rows[sequence], part, keep_logits=False)
                self.commit({sequence: range(len(part))})

    def _extend(self, blocks: Mapping[int, NodeBlock]) -> dict[int, Tensor]:
        logits: dict[int, Tensor] = {}
        for sequence, block in blocks.items():
            row = self._rows[sequence]
            if not block.continues(len(row.drafted)):
                raise MongeError(
                    f"this target reads chains only ({self.why_no_tree}); got a tree: use "
                    "tree='chain'"
                )
            logits[sequence] = self._read(row, block.token_ids, keep_logits=True)
        return logits

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        super().commit(paths)
        for sequence, path in paths.items():
            row = self._rows[sequence]
            accepted, dropped = row.drafted[: len(path)], len(row.drafted) - len(path)
            if dropped and self.why_no_draft is not None:
                raise MongeError(f"{dropped} read tokens cannot be taken back: {self.why_no_draft}")
            if self._crops:
                if dropped:
                    row.cache.crop(-dropped)
            elif row.snapshot is not None:
                if accepted and not dropped:
                    row.unread = ()
                else:
                    row.snapshot.restore(row.cache)
                    row.unread += accepted
            row.length += len(accepted)
            row.drafted, row.snapshot = (), None
            if len(row.unread) > _MOST_UNREAD:
                first = row.length - len(row.unread)
                self._forward(row.cache, first, row.unread, keep_logits=False)
                row.unread = ()

    def length(self, sequence: int) -> int:
        return self._rows[sequence].length

    def close(self, sequence: int) -> None:
        del self._rows[sequence]
        super().close(sequence)

    @contextmanager
    def _plainly(self, text: tuple[int, Sequence[int]] | None) -> Iterator[None]:
        if text is not None:
            self._rows[text[0]] = self._new_row()
            self._append(dict([text]))
        yield

    def _why_no_chain(self) -> str | None:
        """Return why several tokens cannot be read at once after the cache, or `None`."""
        name, block = type(self.network).__name__, (_TRIAL_BLOCK,)
        length = 3 if self._crops else _TRIAL_PROMPT
        try:
            together = self._trial_logits(length, block)
        except Exception as error:  # noqa: BLE001  networks fail in ways of their own
            return f"{name} cannot read several tokens behind its cache: {_in_words(error)}"
        if self._crops:
            return None
        apart = self._trial_logits(length, (1,) * _TRIAL_BLOCK)
        without_state = self._trial_logits(0, block)
        error = (together - apart).norm() / (without_state - apart).norm()
        # Rounding gives 1e-3 in float32 and 0.05 in bfloat16; a state that is lost gives 0.3.
        if error <= (0.01 if self.dtype.itemsize >= 4 else 0.1):
            return None
        return f"{name} does not continue from its recurrent state when it reads several tokens at once"

    def _trial_logits(self, length: int, sizes: Sequence[int]) -> Float[Tensor, "nodes vocab"]:
        """Return logits of a fixed block after a prompt, read in parts.

        Args:
            length: Tokens of the prompt.
            sizes: Tokens of each part of the block.
        """
        text = [7 * place % self.vocab_size for place in range(_TRIAL_PROMPT + _TRIAL_BLOCK)]
        start, logits = _TRIAL_PROMPT, list[Tensor]()
        try:
            self.open({_TRIAL: text[start - length : start]})
            for size in sizes:
                part = text[start : start + size]
                logits.append(self._read(self._rows[_TRIAL], part, keep_logits=True).double())
                self.commit({_TRIAL: range(size)})
                start += size
            return torch.cat(logits)
        finally:
            self._rows.pop(_TRIAL, None)
            super().close(_TRIAL)
            self._forward_s = 0.0

    def _read(self, row: _ChainRow, token_ids: Sequence[int], *, keep_logits: bool) -> Tensor:
        """Read tokens after the drafted tokens; before the first draft, also the unread tokens."""
        waiting: tuple[int, ...] = () if row.drafted else row.unread
        if self.why_no_draft is None and not self._crops and not row.drafted:
            row.snapshot = CacheSnapshot(row.cache)
        first = row.length + len(row.drafted) - len(waiting)
        logits = self._forward(row.cache, first, (*waiting, *token_ids), keep_logits=keep_logits)
        row.drafted += tuple(token_ids)  # only now: a forward that fails has read nothing
        return logits[-len(token_ids) :]

    def _forward(
        self, cache: DynamicCache, first: int, token_ids: Sequence[int], *, keep_logits: bool
    ) -> Tensor:
        """Return logits of tokens from position `first` on, which the cache then holds."""
        device, positions = self._device, None
        ids = torch.tensor([list(token_ids)]).to(device, non_blocking=True)
        if self._takes_position_ids:
            positions = torch.arange(first, first + len(token_ids), device=device)[None]
        start = now()
        with torch.inference_mode():
            logits = self._eager(ids, positions, {}, cache, keep_logits=keep_logits).logits
        self._forward_s += now() - start
        return logits[0]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
