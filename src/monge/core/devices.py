"""From the host to a device."""

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A tensor of the host on a device; itself, where it lies there already.

    The host does not wait for what the device is busy with: what is sent is put by at once. Tensors that are made on a device
    of Python numbers make it wait, and so does everything that comes back.
    """
    return tensor.to(device=device, non_blocking=True)
