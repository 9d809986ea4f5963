"""Rows of different lengths as one tensor."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

BEYOND: Final = 2**62
"""Fills rows of increasing token ids, which stay increasing.

Beyond all tokens, and exact as the float it is passed on as.
"""


def padded(rows: Sequence[Tensor], value: float | int = 0.0) -> Tensor:
    """Rows `[length]` as `[rows, longest]`."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
