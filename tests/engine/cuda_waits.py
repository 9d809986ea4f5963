"""Waits of the host for a CUDA device, as torch tells them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Give how often the host has waited since."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(one.message) for one in told)
        finally:
            torch.cuda.set_sync_debug_mode("default")
