"""Hidden states of committed tokens, kept from the forwards that score trees."""

from collections.abc import Mapping, Sequence
from typing import Final
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OptionError

_MOST_PARTS: Final = 64
"""Parts of a text that are kept side by side. Each holds the states of its whole batch, other texts among them."""


class HiddenStates:
    """Hidden states that a network gives to the heads that need them; each head has its own log.

    Attributes:
        layers: Indices of the states that a forward must give, ascending. 0 is the embedding's
            output, i is the output of layer i; the last is taken after the final norm.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers: tuple[int, ...] = ()
        self._num_layers = num_layers
        self._logs = WeakSet[HiddenStateLog]()  # a log ends with the head that holds it
        self._archive: HiddenStateLog | None = None

    def watch(self, layers: Sequence[int], *, only_last: bool = False) -> "HiddenStateLog":
        """Return a log of some states, see `HiddenStateLog`.

        Raises:
            OptionError: If an index is out of range.
        """
        wrong = [layer for layer in layers if not 0 <= layer <= self._num_layers]
        if wrong or not layers:
            raise OptionError(
                f"hidden states of layers {list(layers)} were asked for; this network has 0 "
                f"(embedding) to {self._num_layers} (what its output layer reads)"
            )
        log = HiddenStateLog(layers, only_last=only_last)
        self._logs.add(log)
        self.archive(is_wanted=False)
        self.layers = tuple(sorted({layer for log in self._logs for layer in log.layers}))
        return log

    def archive(self, *, is_wanted: bool) -> None:
        """Keep the states of all tokens that are committed from now on, for `save`, or no longer."""
        if is_wanted and self._archive is None and self.layers:
            self._archive = HiddenStateLog(self.layers)
            self._logs.add(self._archive)
        elif not is_wanted and self._archive is not None:
            self._logs.discard(self._archive)
            self._archive = None

    def is_complete(self, sequence: int, length: int) -> bool:
        """Return whether the states of all committed tokens are kept, if any are watched."""
        if not self.layers or not length:
            return True
        states = None if self._archive is None else self._archive.look(sequence)
        return states is not None and len(states) == length

    def save(self, sequence: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return a copy of the kept states of committed tokens, layers side by side, if any are watched."""
        states = None if self._archive is None else self._archive.look(sequence)
        return () if states is None else (states[start:stop].clone(),)

    def load(self, sequence: int, states: Float[Tensor, "tokens width"]) -> None:
        """Log the states of tokens that were read before, as `save` returned them, and commit them."""
        if len(states):
            parts = states[None].split(states.shape[1] // len(self.layers), dim=2)
            self.read({sequence: (0, len(states))}, parts)
            self.commit({sequence: range(len(states))})

    def read(
        self,
        places: Mapping[int, tuple[int, int]],
        states: Sequence[Float[Tensor, "rows nodes hidden"]],
    ) -> None:
        """Log the new uncommitted nodes of a forward.

        Args:
            places: Row of each sequence, and the number of its nodes.
            states: A tensor for each index of `layers`.
        """
        by_layer = dict(zip(self.layers, states, strict=True))
        for log in self._logs:
            # A copy, even of one: some steps write the next outputs into the same memory.
            rows = torch.cat([by_layer[layer] for layer in log.layers], dim=-1).unbind()
            for sequence, (row, count) in places.items():
                log.read(sequence, rows[row] if len(rows[row]) == count else rows[row][:count])

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Keep the nodes of a path of each sequence, drop the rest."""
        for log in self._logs:
            for sequence, path in paths.items():
                log.commit(sequence, path)

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        for log in self._logs:
            log.close(sequence)


class HiddenStateLog:
    """Keeps hidden states of uncommitted nodes, and of committed tokens until they are taken.

    Args:
        layers: Indices of hidden states, as in `HiddenStates`.
        only_last: Whether only the last committed token is kept.
    """

    def __init__(self, layers: Sequence[int], *, only_last: bool = False) -> None:
        self.layers, self._only_last = tuple(layers), only_last
        self._nodes: dict[int, list[Tensor]] = {}
        self._fresh: dict[int, list[Tensor]] = {}

    def read(self, sequence: int, states: Float[Tensor, "nodes width"]) -> None:
        """Log new uncommitted nodes, watched layers side by side."""
        self._nodes.setdefault(sequence, []).append(states)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """Keep the nodes of a path, which ascend, and drop the rest."""
        nodes = self._nodes.pop(sequence, [])
        if not (path and nodes):
            return
        known, path = _joined(nodes), path[-1:] if self._only_last else path
        if len(path) < len(known):
            # A slice takes a tenth of what picking rows takes.
            is_run = path[-1] - path[0] == len(path) - 1
            known = known[slice(path[0], path[-1] + 1) if is_run else list(path)]
        fresh = [] if self._only_last else self._fresh.get(sequence, [])
        fresh.append(known)
        self._fresh[sequence] = fresh if len(fresh) < _MOST_PARTS else [torch.cat(fresh)]

    def take(self, sequence: int) -> Float[Tensor, "tokens width"] | None:
        """Return hidden states of the tokens committed since the last call, layers side by side.

        With `only_last`, those of the last token, whether or not they were taken before. `None`
        without any.
        """
        fresh = self._fresh.get(sequence, []) if self._only_last else self._fresh.pop(sequence, [])
        return _joined(fresh) if fresh else None

    def look(self, sequence: int) -> Float[Tensor, "tokens width"] | None:
        """Return what `take` would, without taking it."""
        if fresh := self._fresh.get(sequence, []):
            self._fresh[sequence] = [_joined(fresh)]
        return self._fresh[sequence][0] if fresh else None

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        self._nodes.pop(sequence, None)
        self._fresh.pop(sequence, None)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
