"""Hidden states of committed tokens, kept from the forwards that score trees."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OptionError


class FeatureLog:
    """Remembers hidden states of uncommitted nodes, and of committed tokens until somebody takes them.

    Args:
        layers: Indices of hidden states; 0 is the embedding's output, i that of layer i, the last one after the final norm.
        num_layers: Layers of the network.

    Raises:
        OptionError: If an index is out of range.
    """

    def __init__(self, layers: Sequence[int], num_layers: int) -> None:
        wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
        if wrong or not layers:
            raise OptionError(
                f"hidden states of layers {list(layers)} were asked for; this network has 0 (embedding) to {num_layers} "
                "(what its output layer reads)"
            )
        self.layers = tuple(layers)
        self._nodes: dict[int, list[Tensor]] = {}
        self._fresh: dict[int, list[Tensor]] = {}

    def read(self, sequence: int, states: Sequence[Float[Tensor, "nodes hidden"]]) -> None:
        """New uncommitted nodes, one tensor per watched layer."""
        self._nodes.setdefault(sequence, []).append(torch.cat(tuple(states), dim=-1))

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """Keep the nodes of a path, drop the rest."""
        nodes = self._nodes.pop(sequence, [])
        if path and nodes:
            together = nodes[0] if len(nodes) == 1 else torch.cat(nodes)
            self._fresh.setdefault(sequence, []).append(together[list(path)])

    def take(self, sequence: int) -> Float[Tensor, "tokens width"] | None:
        """Hidden states of the tokens committed since the last call, layers side by side; `None` where there are none."""
        fresh = self._fresh.pop(sequence, [])
        return torch.cat(fresh) if fresh else None

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        self._nodes.pop(sequence, None)
        self._fresh.pop(sequence, None)
