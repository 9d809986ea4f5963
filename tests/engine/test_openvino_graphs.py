"""What is done to OpenVINO graphs before they are compiled: weights in their places, joined products, the runtime's own way."""

import pytest
import torch

from monge.engine import openvino_products
from monge.engine.openvino_paths import run_as_language_model
from monge.engine.openvino_products import Held, place_weights
from monge.engine.openvino_program import runtime_options

openvino = pytest.importorskip("openvino")
opset13 = pytest.importorskip("openvino.opset13")

SIZE, WIDTHS = 16, (8, 3, 5)


def matrix(width, seed, size=SIZE):
    """Numbers that 16 bits hold."""
    return torch.randn(width, size, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def rows_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def input_of(*shape):
    return opset13.parameter(list(shape), openvino.Type.f32)


def run(graph, *inputs):
    compiled = openvino.Core().compile_model(graph, "CPU", runtime_options("f32"))
    return [torch.from_numpy(one.copy()) for one in compiled([one.numpy() for one in inputs]).values()]


def num_products(graph):
    return sum(node.get_type_name() == "MatMul" for node in graph.get_ops())


def graph_of(tensors):
    """Rows times each matrix; the matrices are inputs."""
    rows, matrices = input_of(-1, -1, SIZE), [input_of(*tensor.shape) for tensor in tensors]
    return openvino.Model([opset13.matmul(rows, one, False, True) for one in matrices], [rows, *matrices])


def tensors_of_all_widths():
    return [matrix(width, seed) for seed, width in enumerate(WIDTHS)]


@pytest.mark.parametrize("kind", ["same", "bf16", "int8"])
def test_products_of_the_same_rows_become_one(kind):
    tensors, rows = tensors_of_all_widths(), rows_of(2, 3, SIZE)
    joined, apart = graph_of(tensors), [graph_of([tensor]) for tensor in tensors]
    place_weights(joined, [Held(tensor=tensor, kind=kind) for tensor in tensors])
    for graph, tensor in zip(apart, tensors, strict=True):
        place_weights(graph, [Held(tensor=tensor, kind=kind)])
    assert num_products(joined) == 1
    assert len(joined.inputs) == 1
    for ours, graph, tensor in zip(run(joined, rows), apart, tensors, strict=True):
        assert ours.shape == (2, 3, len(tensor))
        torch.testing.assert_close(ours, run(graph, rows)[0], atol=1e-5, rtol=0)
        if kind != "int8":
            torch.testing.assert_close(ours, rows @ tensor.T, atol=1e-5, rtol=0)


def test_weights_that_do_not_fit_16_bits_keep_all_their_bits():
    tensors, rows = [tensor / 3 for tensor in tensors_of_all_widths()], rows_of(1, 2, SIZE)
    graph = graph_of(tensors)
    expected = [rows @ tensor.T for tensor in tensors]
    place_weights(graph, [Held(tensor=tensor, kind="same") for tensor in tensors])
    del tensors
    for ours, exact in zip(run(graph, rows), expected, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=0)


def test_weights_of_different_kinds_stay_apart():
    tensors, rows = tensors_of_all_widths(), rows_of(1, 2, SIZE)
    graph = graph_of(tensors)
    kinds = ("same", "int8", "same")
    place_weights(graph, [Held(tensor=tensor, kind=kind) for tensor, kind in zip(tensors, kinds, strict=True)])
    assert num_products(graph) == 2
    first, rounded, last = run(graph, rows)
    torch.testing.assert_close(first, rows @ tensors[0].T, atol=1e-5, rtol=0)
    torch.testing.assert_close(last, rows @ tensors[2].T, atol=1e-5, rtol=0)
    assert (rounded - rows @ tensors[1].T).abs().max() > 1e-4


def test_large_matrices_stay_apart(monkeypatch):
    tensors = tensors_of_all_widths()
    monkeypatch.setattr(openvino_products, "_SMALL", SIZE * sum(WIDTHS) - 1)
    graph = graph_of(tensors)
    place_weights(graph, [Held(tensor=tensor, kind="same") for tensor in tensors])
    assert num_products(graph) == len(WIDTHS)


def test_only_products_of_the_same_rows_are_joined():
    """Other rows, a matrix that is read twice, one that is not transposed, a vector: each stays as it is and is right."""
    rows, others = input_of(-1, SIZE), input_of(-1, SIZE)
    shared, alone, plain, bias = input_of(4, SIZE), input_of(4, SIZE), input_of(SIZE, 4), input_of(4)
    outputs = [
        opset13.matmul(rows, shared, False, True),
        opset13.gather(shared, opset13.constant([0]), opset13.constant(0)),
        opset13.matmul(others, alone, False, True),
        opset13.add(opset13.matmul(rows, plain, False, False), bias),
    ]
    graph = openvino.Model(outputs, [rows, others, shared, alone, plain, bias])
    values = [matrix(4, 1), matrix(4, 2), matrix(SIZE, 3, 4), torch.arange(4.0)]
    place_weights(graph, [Held(tensor=tensor, kind="same") for tensor in values])
    assert num_products(graph) == 3
    left, right = rows_of(2, SIZE), rows_of(3, SIZE)
    expected = [left @ values[0].T, values[0][:1], right @ values[1].T, left @ values[2] + values[3]]
    for ours, exact in zip(run(graph, left, right), expected, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=0)


def test_a_language_model_has_the_same_numbers():
    tensors, rows = tensors_of_all_widths(), rows_of(1, 4, SIZE)
    graphs = [graph_of(tensors) for _ in range(2)]
    for graph in graphs:
        place_weights(graph, [Held(tensor=tensor, kind="same") for tensor in tensors])
    run_as_language_model(graphs[0])
    assert len(graphs[0].outputs) == len(graphs[1].outputs)
    compiled = openvino.Core().compile_model(graphs[0], "CPU", runtime_options("f32"))
    assert len(compiled.create_infer_request().query_state()) == 1, "the runtime was to see a state"
    for ours, plain in zip(*(run(graph, rows) for graph in graphs), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
