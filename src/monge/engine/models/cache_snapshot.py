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
        self._copies: list[dict[str, Any]] = [
            {
                name: deepcopy(value)
                for name, value in vars(layer).items()
                if not (_grows(layer) and name in {"keys", "values"})
            }
            for layer in cache.layers
        ]

    @torch.inference_mode()
    def restore(self, cache: DynamicCache, num_read: int) -> None:
        """Return to this state, once.

        Args:
            cache: The cache that the snapshot was taken of.
            num_read: Number of tokens read since.
        """
        for layer, copied in zip(cache.layers, self._copies, strict=True):
            if _grows(layer):
                DynamicLayer.crop(layer, -num_read)
            vars(layer).update(copied)


def _grows(layer: object) -> TypeGuard[DynamicLayer]:
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)
