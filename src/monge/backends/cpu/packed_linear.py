"""Products of a few rows with a matrix whose numbers lie in panels: a torch operation, a module, and its machine code.

A forward of a few tokens is bound by reading the weights, so their size decides how long it takes:
panels hold float32, float16 or bfloat16 numbers, integers of 8 bits with a scale for every 64, or
blocks of integers (`block_panels`).
"""

import copy
import ctypes
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.func import functional_call
from torch.fx import Graph
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from monge.backends.cpu.block_panels import (
    COLUMNS,
    Blocks,
    Layout,
    layout_of,
    matrix_of_blocks,
    panels_of_blocks,
    rows_of_blocks,
)
from monge.backends.cpu.code_cache import layer_facts
from monge.backends.cpu.native_library import OPERATIONS, native_function
from monge.networks.adapters import merged_layer
from monge.networks.network_facts import PackedLayer

GROUPS: Final = {"int8": 64, "int4": 32}
"""Numbers of a row that share a scale, by kind of weights."""
_SCALES: Final = 2 * COLUMNS  # bytes
_ZERO: Final = 128  # what an integer 0 of 8 bits is stored as
_LARGEST: Final = 127
_FOUR_BITS: Final = Layout(4, GROUPS["int4"], has_base=True)
_LARGEST_STORED: Final = 15  # in 4 bits
_MIDDLE: Final = 8  # what 0 is stored as in Q4_0
_MOST_LOST: Final = 0.1  # of the norm of a matrix, in 4 bits
_LOWER: Final = 0xFFFF  # half of a word
_FLOAT16: Final = 2  # names lines of float16, which are as long as those of bfloat16
_PAGE: Final = 4096  # bytes
_NARROW: Final = (torch.bfloat16, torch.float16)
_FEW: Final = 4096  # numbers
_ROWS: Final = 1024  # of a matrix that are rounded at a time; whole panels
_SOURCE: Final = Path(__file__).with_name("packed_linear.cpp")
DECLARATION: Final = (
    "AOTITorchError aoti_torch_cpu_packed_linear("
    "AtenTensorHandle rows, const AtenTensorHandle* panels, int64_t num_matrices, "
    "const int64_t* widths, int64_t num_widths, AtenTensorHandle* out)"
)
"""Of the function that compiled code calls."""

# The machine code reads rows that lie one behind another.
OPERATIONS.define(
    "packed_linear(Tensor rows, Tensor[] panels, int[] widths) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


class PackedLinear(PackedLayer):
    """A linear layer in float32 whose matrix lies in panels.

    Args:
        matrix: `[width, depth]`, float32. Where all of its numbers are bfloat16 numbers, or all are
            float16 numbers, the panels hold 16 bits of each.
        bias: `[width]`, if any.
        weights: A member of `WEIGHTS`. With `int8` and `int4` the rows that are multiplied are
            rounded to 8 bits. A matrix that `four_bit_panels_of` refuses has `int8`.
        panels: The panels of a matrix that was packed before; `matrix` may then be on the device
            `meta`. Panels of integers round the rows.
    """

    def __init__(
        self,
        matrix: Tensor,
        bias: Tensor | None = None,
        *,
        weights: str = "exact",
        panels: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.width, self.depth = matrix.shape
        packed, self.weights = _rounded(matrix, weights) if panels is None else (panels, weights)
        self.bias = bias
        self.register_buffer("panels", packed)

    def follow(self, layer: Any) -> bool:
        """Take the numbers that a plain layer has now; the panels stay where they are, if these still fit.

        Returns:
            False if it is a layer of another shape or type, or the numbers are rounded here.
        """
        if self.weights != "exact" or isinstance(layer, PackedLayer) or not _is_packable(layer):
            return False
        matrix: Tensor = layer.weight.detach()
        matrix = matrix.t() if type(layer) is Conv1D else matrix
        has_bias = layer.bias is not None
        if matrix.shape != (self.width, self.depth) or has_bias != (self.bias is not None):
            return False
        self.bias = layer.bias
        if self.panels.dtype == torch.float32:
            whole = self.width // COLUMNS
            last = matrix[whole * COLUMNS :]
            lines = matrix[: whole * COLUMNS].reshape(whole, COLUMNS, self.depth)
            self.panels[:whole].copy_(lines.transpose(1, 2))
            self.panels[whole:, :, : len(last)] = last.t()
        else:
            self.panels = panels_of(matrix)
        return True

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., depth]` -> `[..., width]`."""
        out = OPERATION(rows.contiguous(), [self.panels], [self.width])
        return out if self.bias is None else out + self.bias

    @property
    def weight(self) -> Tensor:
        """The matrix, for networks that look at it."""
        return matrix_of(self.panels, self.width, self.depth)

    @property
    def rounds_inputs(self) -> bool:
        """True if the rows that are multiplied are rounded to 8 bits."""
        return self.panels.dtype == torch.uint8

    def unpacked(self, dtype: torch.dtype) -> "PlainLinear":
        """Return a layer with the same numbers in a plain matrix, for many reads in another type."""
        return PlainLinear(self, dtype)


class PackedEmbedding(PackedLayer):
    """A token embedding whose matrix lies in panels: a row is read from them when it is needed.

    Args:
        embedding: An embedding whose weights may be on the device `meta`. If a subclass changes
            rows, such as by scaling, so does this layer.
        panels: The matrix.
        weights: How it is stored, a member of `WEIGHTS`.
    """

    def __init__(self, embedding: torch.nn.Embedding, panels: Tensor, weights: str) -> None:
        super().__init__()
        self.width, self.depth = embedding.weight.shape
        self.weights = weights
        self._rest = embedding
        embedding.weight = None  # pyright: ignore[reportAttributeAccessIssue]
        embedding.padding_idx = None  # of gradients
        self.register_buffer("panels", panels)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return embeddings, `[..., depth]` in float32."""
        rows = rows_of(self.panels, token_ids.flatten(), self.depth)
        # Of no fixed number in a trace, as `len` of a tensor would be.
        places = torch.arange(token_ids.numel(), device=rows.device).view(token_ids.shape)
        return functional_call(self._rest, {"weight": rows}, (places,))

    @property
    def weight(self) -> Tensor:
        """The matrix, for networks that look at it."""
        return matrix_of(self.panels, self.width, self.depth)

    @property
    def rounds_inputs(self) -> bool:
        """False: tokens have none."""
        return False

    def unpacked(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return the embedding with the same numbers in a plain matrix."""
        embedding = copy.deepcopy(self._rest)
        embedding.weight = torch.nn.Parameter(self.weight.to(dtype), requires_grad=False)
        return embedding


class PlainLinear(torch.nn.Module):
    """A `PackedLinear` with a plain matrix, for many reads in another type."""

    def __init__(self, packed: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._size, self.weight = group_size_of(packed.panels), packed.weight.to(dtype)
        self._bias = None if packed.bias is None else packed.bias.to(dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., depth]` -> `[..., width]`."""
        read = rows if self._size is None else rounded_rows(rows, self._size)
        return torch.nn.functional.linear(read, self.weight, self._bias)


def _rounded(matrix: Tensor, weights: str) -> tuple[Tensor, str]:
    """Panels, and the kind of weights that they store."""
    if weights == "int4" and (panels := four_bit_panels_of(matrix)) is not None:
        return panels, weights
    if weights in GROUPS:
        return eight_bit_panels_of(matrix), "int8"
    return panels_of(matrix.bfloat16().float() if weights == "bfloat16" else matrix), weights


def panels_of(matrix: Tensor) -> Tensor:
    """Return a matrix in panels of 32 of its rows; zeros fill the last.

    Args:
        matrix: `[width, depth]`, float32.

    Returns:
        `[panels, depth, 16]` of int32, two bfloat16 numbers each, if these hold the matrix exactly;
        else `[panels, depth, 32]` of float16 if this does, or of float32.
    """
    width, depth = matrix.shape
    filled = torch.nn.functional.pad(matrix.detach(), (0, 0, 0, -width % COLUMNS))
    panels = filled.reshape(-1, COLUMNS, depth).transpose(1, 2).contiguous()
    if not _may_be_narrow(panels.flatten()[:_FEW]):
        return panels  # what the first numbers tell takes no pass over all of them
    narrow = panels.bfloat16()
    if not torch.equal(narrow.float(), panels):
        halves = panels.half()
        # Without instructions for them, the machine code reads finite float16 numbers only.
        is_held = torch.equal(halves.float(), panels) and bool(halves.isfinite().all())
        return halves if is_held else panels
    lower, upper = (narrow.view(torch.int16).int() & _LOWER).split(COLUMNS // 2, dim=-1)
    return (lower | upper << 16).contiguous()


def _may_be_narrow(numbers: Tensor) -> bool:
    return any(torch.equal(numbers.to(kind).float(), numbers) for kind in _NARROW)


def eight_bit_panels_of(matrix: Tensor) -> Tensor:
    """Return a matrix in panels of 8-bit integers, `[panels, groups, bytes]` of uint8.

    A group is 64 numbers of each of 32 rows: 32 bfloat16 scales, in the order of a bfloat16 line,
    then the numbers divided by their scale and rounded, four of each row side by side. A scale is
    the largest number of its group divided by 127, rounded up to bfloat16.
    """
    groups = _groups_of(matrix, GROUPS["int8"])
    scales = groups.abs().amax(dim=-1) / _LARGEST
    # Towards infinity: the largest number must not round to 128.
    raised = ((scales.view(torch.int32) + _LOWER) >> 16).to(torch.int16)
    scales = raised.view(torch.bfloat16).float()
    numbers = torch.where(scales[..., None] > 0, groups / scales[..., None], 0.0).round()
    stored = (numbers + _ZERO).to(torch.uint8).unflatten(-1, (-1, 4)).transpose(2, 3).flatten(2)
    # Words of two scales: those of columns j and 16 + j.
    paired = raised.unflatten(-1, (2, COLUMNS // 2)).transpose(2, 3).contiguous()
    return torch.cat([paired.view(torch.uint8).flatten(2), stored], dim=-1)


def four_bit_panels_of(matrix: Tensor) -> Tensor | None:
    """Return a matrix in panels of 4-bit integers, `[panels, groups, bytes]` of uint8.

    A group is 32 numbers of each of 32 rows: 32 float16 scales, 32 float16 bases, then the integers,
    eight of each row side by side; a number is base + scale x integer. Scale and base are those of
    Q4_1 or Q4_0 in GGUF files, whichever is closer: the integers 0 and 15 are the least and the
    largest number, or 0 is the number that is farthest from zero and 8 is zero. So blocks of both
    kinds keep their numbers, if the file was made from least and largest numbers.

    Args:
        matrix: `[width, depth]`, float32.

    Returns:
        The panels, or `None` if the numbers are too unequal: the norm of the errors is above 10 % of
        their own (it is 8 % for normal numbers), or float16 cannot hold a scale.
    """
    # Some rows at a time, since this takes several times the memory of what it reads.
    parts = [_four_bit_rows(rows) for rows in matrix.split(_ROWS)]
    # An error is not a number where float16 is infinite.
    if not torch.stack([error for _, error in parts]).sum().sqrt() <= _MOST_LOST * matrix.norm():
        return None
    return torch.cat([panels for panels, _ in parts])


def _four_bit_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Panels, and the sum of squared errors."""
    groups = _groups_of(matrix, GROUPS["int4"])
    least, largest = groups.aminmax(dim=-1)
    scale, base = ((largest - least) / _LARGEST_STORED).half(), least.half()
    integers, error = _integers_of(groups, scale, base)
    if error.any():  # otherwise nothing is closer
        farthest = (torch.where(largest > -least, largest, least) / -_MIDDLE).half()
        other = farthest, farthest * -_MIDDLE
        others, other_error = _integers_of(groups, *other)
        is_other = other_error < error
        scale, base = torch.where(is_other, other[0], scale), torch.where(is_other, other[1], base)
        integers = torch.where(is_other[..., None], others, integers)
        error = torch.minimum(error, other_error)
    halves = torch.stack([scale, base], dim=-1)
    integers, halves = (part.transpose(1, 2).flatten(0, 1) for part in (integers, halves))
    panels = panels_of_blocks(_FOUR_BITS, Blocks(integers[:, :, None], halves))
    return panels, error.sum()


def _groups_of(matrix: Tensor, size: int) -> Tensor:
    """`[panels, groups, columns, size]`; zeros fill the last group and the last panel."""
    width, depth = matrix.shape
    filled = torch.nn.functional.pad(matrix.detach(), (0, -depth % size, 0, -width % COLUMNS))
    return filled.reshape(-1, COLUMNS, filled.shape[1] // size, size).transpose(1, 2)


def _integers_of(groups: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integers, uint8, and the squared error of each group."""
    scale, base = scale.float()[..., None], base.float()[..., None]
    steps = torch.where(scale == 0, 0.0, (groups - base) / scale)
    integers = steps.round_().clamp_(0, _LARGEST_STORED)
    error = (base + scale * integers - groups).square_().sum(dim=-1)
    return integers.to(torch.uint8), error


def group_size_of(panels: Tensor) -> int | None:
    """Numbers of a row that share a scale, or `None` where panels hold floats."""
    if panels.dtype != torch.uint8:
        return None
    layout = layout_of(panels)
    return GROUPS["int8"] if layout is None else layout.group


def _block_size_of(panels: Tensor) -> int:
    """Numbers of a row in a line or block of panels."""
    layout = layout_of(panels)
    return (group_size_of(panels) or 1) if layout is None else layout.size


def matrix_of(panels: Tensor, width: int, depth: int | None = None) -> Tensor:
    """The matrix that panels hold: `[width, depth]`, float32."""
    if (layout := layout_of(panels)) is not None:
        return matrix_of_blocks(panels, layout)[:width, :depth]
    if panels.dtype == torch.uint8:
        raised = panels[..., :_SCALES].contiguous().view(torch.int16)
        scales = raised.unflatten(-1, (COLUMNS // 2, 2)).transpose(2, 3).flatten(2)
        stored = panels[..., _SCALES:].unflatten(-1, (-1, COLUMNS, 4)).transpose(2, 3)
        numbers = stored.flatten(3).float() - _ZERO
        groups = numbers * scales.contiguous().view(torch.bfloat16)[..., None]
        return groups.transpose(1, 2).flatten(2).flatten(0, 1)[:width, :depth]
    return _floats_of(panels).transpose(1, 2).reshape(-1, panels.shape[1])[:width]


def _floats_of(panels: Tensor) -> Tensor:
    if panels.dtype != torch.int32:
        return panels.float()
    halves = panels << 16, panels & ~_LOWER
    return torch.cat([half.view(torch.float32) for half in halves], dim=-1)


def rows_of(panels: Tensor, row_ids: Tensor, depth: int) -> Tensor:
    """Rows of the matrix that panels of floats or of blocks hold: `[rows, depth]`, float32.

    Args:
        panels: The panels.
        row_ids: Numbers of the rows, `[rows]`.
        depth: Numbers of a row.
    """
    if (layout := layout_of(panels)) is not None:
        return rows_of_blocks(panels, layout, row_ids)[:, :depth]
    panel, column = row_ids // COLUMNS, row_ids % COLUMNS
    if panels.dtype != torch.int32:
        return panels.transpose(1, 2)[panel, column].float()
    words = panels.transpose(1, 2)[panel, column % (COLUMNS // 2)]
    raised = torch.where(column[:, None] < COLUMNS // 2, words << 16, words & ~_LOWER)
    return raised.view(torch.float32)


def rounded_rows(rows: Tensor, size: int) -> Tensor:
    """Return rows as products with rounded panels read them.

    The numbers of a group are multiples of `largest / 127`, where `largest` is the largest
    magnitude in the group. They are zeros if `127 / largest` is not finite.
    """
    depth = rows.shape[-1]
    groups = torch.nn.functional.pad(rows, (0, -depth % size)).unflatten(-1, (-1, size))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    is_rounded = largest > _LARGEST / torch.finfo(rows.dtype).max
    numbers = torch.where(is_rounded, groups * (_LARGEST / largest), 0.0).round()
    return (numbers * (largest / _LARGEST)).flatten(-2)[..., :depth]


def _packed_linear(rows: Tensor, panels: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    products = [_product(rows, *pair) for pair in zip(panels, widths, strict=True)]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def _product(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    depth = rows.shape[-1]
    # The machine code would read past the panels.
    if panels.shape[1] != -(-depth // _block_size_of(panels)):
        raise ValueError(f"rows of {depth} numbers do not fit panels {tuple(panels.shape)}")
    if rows.dtype == torch.float32 and _LOADED:
        out = rows.new_empty(*rows.shape[:-1], width)
        rows = rows.contiguous()
        failed = _LOADED[-1](
            rows.data_ptr(),
            panels.data_ptr(),
            out.data_ptr(),
            rows.numel() // max(depth, 1),
            depth,
            width,
            _FLOAT16 if panels.dtype == torch.float16 else panels.shape[2] * panels.itemsize,
        )
        if failed:
            raise RuntimeError("products of few rows failed")
        return out
    return plain_packed_linear(rows, panels, width)


def plain_packed_linear(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    """Return the product with a matrix, computed without machine code, in the type of the rows."""
    size, matrix = group_size_of(panels), matrix_of(panels, width, rows.shape[-1])
    read = rows if size is None else rounded_rows(rows, size)
    return torch.nn.functional.linear(read, matrix.to(rows.dtype))


def _shape_of_packed_linear(
    rows: Tensor, panels: Sequence[Tensor], widths: Sequence[int]
) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], sum(widths))


# What runs outside of compiled code.
OPERATIONS.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("monge::packed_linear", _shape_of_packed_linear, lib=OPERATIONS)

_NAMESPACE: Any = torch.ops.monge
OPERATION: Final = _NAMESPACE.packed_linear.default
"""`(rows, panels, widths) -> rows x matrices`; the results of a row are concatenated."""

_LOADED: Final = list[Any]()  # the machine code, once compiled code or a packed network needs it


def merge_products(graph: Graph) -> None:
    """Merge products of the same rows, such as queries, keys and values, into a single operation.

    The rows are rounded once, and threads start once.
    """
    same_rows = defaultdict[tuple[Any, ...], list[Any]](list)
    for node in graph.find_nodes(op="call_function", target=OPERATION):
        arguments: Any = node.args
        rows, (panels,), _ = arguments
        while rows.target is torch.ops.aten.contiguous.default:
            rows = rows.args[0]
        stored = panels.meta["val"]
        same_rows[rows, stored.dtype, stored.shape[2]].append(node)
    for nodes in same_rows.values():
        if len(nodes) > 1:
            _merge(graph, nodes)


def _merge(graph: Graph, nodes: Sequence[Any]) -> None:
    """Replace calls for single matrices by a call for all, and slices of its result."""
    first, slice_of = nodes[0], torch.ops.aten.slice.Tensor
    panels = [node.args[1][0] for node in nodes]
    widths = [node.args[2][0] for node in nodes]
    with graph.inserting_before(first):
        merged = graph.call_function(OPERATION, (first.args[0], panels, widths))
        last, end = first.meta["val"].ndim - 1, 0
        for node, width in zip(nodes, widths, strict=True):
            part = graph.call_function(slice_of, (merged, last, end, end + width))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            end += width
    for node in nodes:
        graph.erase_node(node)


def pack_linears(
    module: torch.nn.Module, weights: str = "exact", output: torch.nn.Module | None = None
) -> None:
    """Change the layout of linear layers' weights, in place; the old tensors do not change.

    Float32 layers become `PackedLinear`; weights of float64, and of subclasses of linear layers,
    lie transposed. Half precision stays: torch has products of few rows for the usual order only,
    in the other they take ten times longer.

    Args:
        module: A module; itself no linear layer.
        weights: Storage of the matrices of `PackedLinear`, a member of `WEIGHTS`. Matrices that
            lose too much in 4 bits have 8.
        output: The output layer of a network: logits lose most, so it has 8 bits in place of 4.
    """
    replacements = dict[int, torch.nn.Module]()  # a map that is used in several places stays one
    new = list[PackedLinear]()
    for parent in tuple(module.modules()):
        for name, child in tuple(parent.named_children()):
            if id(child) not in replacements:
                finer = weights == "int4" and child is output
                packed = _packed(child, "int8" if finer else weights)
                replacements[id(child)] = packed
                if packed is not child and isinstance(packed, PackedLinear):
                    new.append(packed)
            if replacements[id(child)] is not child:
                parent.add_module(name, replacements[id(child)])
    _lay_together(new)


def _lay_together(layers: Sequence[PackedLinear]) -> None:
    """Move panels into a block of memory, in their order: they are read up to a tenth faster."""
    sizes = [-(-layer.panels.nbytes // _PAGE) * _PAGE for layer in layers]
    block = torch.empty(sum(sizes), dtype=torch.uint8)
    for layer, place in zip(layers, block.split(sizes), strict=True):
        moved = place[: layer.panels.nbytes].view(layer.panels.dtype).view(layer.panels.shape)
        layer.panels = moved.copy_(layer.panels)


def _is_packable(layer: torch.nn.Module) -> bool:
    is_map = type(layer) in {torch.nn.Linear, Conv1D} or getattr(layer, "is_linear_map", False)
    weight: Any = getattr(layer, "weight", None)
    return is_map and weight.dtype == torch.float32 and weight.device.type == "cpu"


def follow_weights(packed: torch.nn.Module, source: torch.nn.Module) -> bool:
    """Give a packed copy of a module the numbers that the module has now; both may have moved.

    Args:
        packed: The copy, after `pack_linears`, with adapters merged.
        source: The module.

    Returns:
        False if the layers differ: this copy is then of no use, and the caller needs another.
    """
    sources = dict(source.named_modules(remove_duplicate=False))
    origins = dict[int, tuple[object, object]]()

    def has_another_origin(mine: object, theirs: object) -> bool:
        """Return whether an object of `packed` stands for two objects of `source`.

        Compiled code may read it by a single name.
        """
        return origins.setdefault(id(mine), (mine, theirs))[1] is not theirs

    for name, layer in packed.named_modules(remove_duplicate=False):
        if name not in sources or has_another_origin(layer, sources[name]):
            return False
        origin: Any = sources[name]
        if hasattr(origin, "set_adapter") and not isinstance(origin, PreTrainedModel):
            origin = merged_layer(origin)
        if isinstance(layer, PackedLinear) and not isinstance(origin, PackedLayer):
            if not layer.follow(origin):
                return False
            continue
        is_attention = getattr(origin, "is_cache_attention", False)
        is_same = is_attention or layer_facts(layer) == layer_facts(origin)
        if not is_same or layer._modules.keys() != origin._modules.keys():
            return False
        if any(
            _facts(mine) != _facts(theirs)
            for mine, theirs in (
                (layer._parameters, origin._parameters),
                (layer._buffers, origin._buffers),
            )
        ):
            return False
        for key, weight in origin._parameters.items():
            kept = layer._parameters[key]
            if kept is not None and has_another_origin(kept, weight):
                return False
            if weight is not None and kept is not None and kept.stride() != weight.stride():
                kept.data.copy_(weight)  # which was laid out anew
            else:
                layer._parameters[key] = weight
        layer._buffers.update(origin._buffers)
    return True


def _facts(tensors: Mapping[str, Tensor | None]) -> list[object]:
    return [
        (name, tensor is not None and (tensor.shape, tensor.dtype, tensor.device))
        for name, tensor in tensors.items()
    ]


def pack_draft_module(module: torch.nn.Module) -> None:
    """Store the float32 maps of a module that only drafts in 4 bits, or 8 where much is lost, in place."""
    load_packed_linear()
    pack_linears(module, "int4")


def _packed(child: torch.nn.Module, weights: str) -> torch.nn.Module:
    if isinstance(child, PackedLayer):  # whose weight would be made anew
        return child
    if _is_packable(child):
        layer: Any = child
        matrix = layer.weight.t() if type(child) is Conv1D else layer.weight
        return PackedLinear(matrix, layer.bias, weights=weights)
    if isinstance(child, torch.nn.Linear) and child.weight.dtype in {torch.float32, torch.float64}:
        child.weight = torch.nn.Parameter(
            child.weight.detach().t().contiguous().t(), requires_grad=False
        )
    return child


@cache
def load_packed_linear() -> None:
    """Make the machine code known to the compiled code that this process loads later.

    Raises:
        RuntimeError, OSError: As `native_function`.
    """
    arguments = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 4)
    _LOADED.append(native_function(_SOURCE, "monge_packed_linear", arguments))
