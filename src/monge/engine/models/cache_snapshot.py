"""A copy of the parts of a cache that cannot be cropped."""

from copy import deepcopy
from typing import Any, TypeGuard

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class CacheSnapshot:
    """The state of a cache, to return to.

    Keys and values of full attention grow with the text, and are cropped. Recurrent states and
    windows have a fixed size, and are copied.

    Args:
        cache: The cache; the network may go on with it.
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
        """Return to this state, once; also after a forward that failed between two layers.

        Args:
            cache: The cache that the snapshot was taken of.
        """
        for layer, length, copied in zip(cache.layers, self._lengths, self._copies, strict=True):
            if _grows(layer) and (added := layer.get_seq_length() - (length or 0)):
                DynamicLayer.crop(layer, -added)
            vars(layer).update(copied)


def _grows(layer: object) -> TypeGuard[DynamicLayer]:
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)
