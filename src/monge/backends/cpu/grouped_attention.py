"""Attention whose result does not depend on how many queries are read together.

A torch operation and its machine code. Kernels for attention choose blocks of queries and columns
by their numbers, so a query gets other rounding errors in another batch. Here a result depends on
nothing but its query and the keys and values that it sees, in their order.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from monge.backends.cpu.native_library import OPERATIONS, native_function

_SOURCE: Final = Path(__file__).with_name("grouped_attention.cpp")
DECLARATION: Final = (
    "AOTITorchError aoti_torch_cpu_grouped_attention("
    "AtenTensorHandle queries, AtenTensorHandle keys, AtenTensorHandle values, "
    "AtenTensorHandle mask, double scale, AtenTensorHandle* out)"
)
"""Of the function that compiled code calls."""

# The machine code reads rows whose numbers lie side by side.
OPERATIONS.define(
    "grouped_attention(Tensor queries, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def plain_grouped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """The plain twin of the machine code, in the type of the queries; see `OPERATION`."""
    width = mask.shape[-1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries,
        keys[:, :, :width],
        values[:, :, :width],
        attn_mask=mask,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return attended.transpose(1, 2).contiguous()


def _grouped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    run = _LOADED[-1] if _LOADED else None
    is_dense = all(tensor.stride(-1) == 1 for tensor in (queries, keys, values, mask))
    if run is None or not is_dense or queries.dtype != torch.float32:
        return plain_grouped_attention(queries, keys, values, mask, scale)
    batch, heads, nodes, dim = queries.shape
    out = queries.new_empty(batch, nodes, heads, values.shape[-1])
    strides = [size for tensor in (queries, keys, values) for size in tensor.stride()[:3]]
    sizes = [batch, heads, keys.shape[1], nodes, mask.shape[-1], dim, values.shape[-1]]
    seen = [0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(2)]
    layout = (ctypes.c_int64 * 18)(*sizes, *strides, *seen)
    if run(*(tensor.data_ptr() for tensor in (queries, keys, values, mask, out)), layout, scale):
        raise RuntimeError("grouped attention failed")
    return out


def _shape_of_grouped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    batch, heads, nodes, _ = queries.shape
    return queries.new_empty(batch, nodes, heads, values.shape[-1])


# What runs outside of compiled code.
OPERATIONS.impl("grouped_attention", _grouped_attention, "CPU")
torch.library.register_fake("monge::grouped_attention", _shape_of_grouped_attention, lib=OPERATIONS)

_NAMESPACE: Any = torch.ops.monge
OPERATION: Final = _NAMESPACE.grouped_attention.default
"""`(queries, keys, values, mask, scale) -> [batch, nodes, heads, value_dim]`, float32.

Queries `[batch, heads, nodes, dim]`, keys `[batch, shared, columns, dim]`, values
`[batch, shared, columns, value_dim]`, mask `[batch or 1, 1, nodes, columns]`, bool. Keys and values
may have more columns than the mask; these are not read.
"""

_LOADED: Final = list[Any]()


@cache
def load_grouped_attention() -> None:
    """Make the machine code known to the compiled code that this process loads later.

    Raises:
        RuntimeError, OSError: As `native_function`.
    """
    arguments = (*(ctypes.c_void_p,) * 5, ctypes.POINTER(ctypes.c_int64), ctypes.c_double)
    _LOADED.append(native_function(_SOURCE, "monge_grouped_attention", arguments))
