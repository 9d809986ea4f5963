"""Weights in an OpenVINO graph: each in the place of its input, and small products of the same rows as one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from monge.engine.openvino_weights import constant

_SMALL: Final = 2**22  # numbers in a matrix; the runtime reads more than these for longer than it takes to start a product


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A weight and how its numbers are held, see `openvino_weights.constant`."""

    tensor: Tensor
    kind: str


def place_weights(graph: Any, weights: Sequence[Held]) -> None:
    """Put weights in the place of the graph's last inputs.

    Small matrices that multiply the same rows (queries, keys and values; the two maps of a gated layer) become one matrix, so
    that the runtime starts one product where it would start several. Every number is still the same sum.

    Args:
        graph: An `openvino.Model`, changed in place.
        weights: Those of its last inputs, in their order.
    """
    parameters = graph.get_parameters()[-len(weights) :]
    held = dict(zip((parameter.get_friendly_name() for parameter in parameters), weights, strict=True))
    for products in list(_of_the_same_rows(parameters, held)):
        _join(products, [held[_matrix(product).get_friendly_name()] for product in products])
    for parameter, weight in zip(parameters, weights, strict=True):
        if parameter.output(0).get_target_inputs():
            parameter.output(0).replace(constant(weight.tensor, weight.kind).output(0))
        graph.remove_parameter(parameter)
    graph.validate_nodes_and_infer_types()


def _of_the_same_rows(parameters: Sequence[Any], held: dict[str, Held]) -> Iterator[list[Any]]:
    """Products to join: groups of at least two."""
    groups: dict[tuple[str, int, str], list[Any]] = {}
    for parameter in parameters:
        product, weight = _only_product(parameter), held[parameter.get_friendly_name()]
        if product is not None and weight.tensor.ndim == 2:
            rows = product.input_value(0)
            groups.setdefault((rows.get_node().get_friendly_name(), rows.get_index(), weight.kind), []).append(product)
    for products in groups.values():
        size = sum(held[_matrix(product).get_friendly_name()].tensor.numel() for product in products)
        if len(products) > 1 and size <= _SMALL:
            yield products


def _only_product(parameter: Any) -> Any | None:
    """The product of rows with this transposed matrix, if nothing else reads the matrix."""
    readers = [reader.get_node() for reader in parameter.output(0).get_target_inputs()]
    if len(readers) != 1 or readers[0].get_type_name() != "MatMul":
        return None
    (product,) = readers
    kept = product.get_attributes()
    is_map = kept["transpose_b"] and not kept["transpose_a"] and product.input_value(0).get_node() != parameter
    return product if is_map else None


def _matrix(product: Any) -> Any:
    return product.input_value(1).get_node()


def _join(products: Sequence[Any], weights: Sequence[Held]) -> None:
    from openvino import opset13

    joined = constant(torch.cat([weight.tensor for weight in weights]), weights[0].kind, is_copied=True)
    together = opset13.matmul(products[0].input_value(0), joined, False, True)
    widths = np.array([len(weight.tensor) for weight in weights], dtype=np.int64)
    parts = opset13.variadic_split(together, opset13.constant(np.int64(-1)), opset13.constant(widths))
    for index, product in enumerate(products):
        product.output(0).replace(parts.output(index))
