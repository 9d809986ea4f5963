"""Building blocks of published heads."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from monge.core.errors import ModelLoadError
from monge.heads.readers.tensors import Tensors

Nodes = Float[Tensor, "nodes _"]
"""One row a node; widths differ from use to use."""


def activation(name: str, where: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by the name that the host gives it.

    Raises:
        ModelLoadError: If the name is unknown.
    """
    if name not in ACT2FN:
        raise ModelLoadError(f"{where!r}: activation {name!r} is not known to transformers")
    return ACT2FN[name]


class Projection(nn.Module):
    """A linear layer, with a bias if the checkpoint has one.

    Args:
        tensors: Tensors of the checkpoint.
        name: Tensor name, without `.weight`.
        rows: Output width.
        columns: Input width.
    """

    is_linear_map: ClassVar = True  # backends may store the matrix in another form
    weight: Tensor
    bias: Tensor | None

    def __init__(self, tensors: Tensors, name: str, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", tensors.take(f"{name}.weight", rows, columns))
        self.register_buffer("bias", tensors.maybe(f"{name}.bias", rows))

    def forward(self, values: Float[Tensor, "*nodes columns"]) -> Float[Tensor, "*nodes rows"]:
        return functional.linear(values, self.weight, self.bias)


class Norm(nn.Module):
    """RMS normalisation over the last dimension, in float32 or wider.

    Args:
        tensors: Tensors of the checkpoint.
        name: Tensor name, without `.weight`.
        size: Width.
        eps: Added to the mean square: part of the published networks' definition.
        centred: Whether the weight is stored minus 1.
    """

    weight: Tensor

    def __init__(
        self, tensors: Tensors, name: str, size: int, eps: float, *, centred: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, 1.0 if centred else 0.0
        self.register_buffer("weight", tensors.take(f"{name}.weight", size))

    def forward(self, values: Float[Tensor, "*nodes width"]) -> Float[Tensor, "*nodes width"]:
        wide = values if values.dtype == torch.float64 else values.float()
        scaled = functional.rms_norm(wide, wide.shape[-1:], None, self.eps)
        if self.offset:
            return (scaled * (self.offset + self.weight.to(scaled.dtype))).to(values.dtype)
        return self.weight * scaled.to(values.dtype)


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)).

    Args:
        tensors: Tensors of the checkpoint.
        name: Prefix of its tensor names.
        hidden: Input and output width.
        inner: Inner width.
        act: Activation function.
    """

    def __init__(
        self,
        tensors: Tensors,
        name: str,
        hidden: int,
        inner: int,
        *,
        act: Callable[[Tensor], Tensor] = functional.silu,
    ) -> None:
        super().__init__()
        self.gate, self.up = (
            Projection(tensors, f"{name}.{part}_proj", inner, hidden) for part in ("gate", "up")
        )
        self.down = Projection(tensors, f"{name}.down_proj", hidden, inner)
        self.act = act

    def forward(self, values: Nodes) -> Nodes:
        return self.down(self.act(self.gate(values)) * self.up(values))


class ResBlocks(nn.Module):
    """x + act(linear(x)), block after block.

    If the first block reduces the width, a linear map replaces its x.

    Args:
        tensors: Tensors of the checkpoint.
        names: Tensor names of the blocks.
        hidden: Output width.
        width: Input width.
        narrowing: Tensor name of the linear map that replaces x; `None` without one.
    """

    def __init__(
        self,
        tensors: Tensors,
        names: Sequence[str],
        hidden: int,
        width: int,
        *,
        narrowing: str | None = None,
    ) -> None:
        super().__init__()
        widths = [width] + [hidden] * (len(names) - 1)
        self.linears = nn.ModuleList(
            Projection(tensors, f"{name}.linear", hidden, columns)
            for name, columns in zip(names, widths, strict=True)
        )
        self.skip = None if narrowing is None else Projection(tensors, narrowing, hidden, width)

    def forward(self, values: Nodes) -> Nodes:
        for place, linear in enumerate(self.linears):
            kept = self.skip(values) if place == 0 and self.skip is not None else values
            values = kept + functional.silu(linear(values))
        return values
