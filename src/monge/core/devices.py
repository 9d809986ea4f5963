"""Copies from the host to a device."""

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a host tensor on a device; the tensor itself if it is there already.

    The copy is asynchronous, so the host does not wait for the device. Creating a device tensor
    from Python numbers waits, and so does every copy back.
    """
    return tensor.to(device=device, non_blocking=True)
