"""Weights of OpenVINO graphs: which numbers are held, in how many bits, and whose memory they are in."""

import pytest
import torch

from monge.core.errors import BackendError
from monge.engine.openvino_weights import constant, linear_weights, with_weights
from tests.engine.tiny import network


def target():
    return network("llama", "sdpa")


def evaluated(node):
    """What the runtime makes of a node without inputs."""
    import openvino
    from openvino import opset13

    unused = opset13.parameter([1], openvino.Type.f32)
    compiled = openvino.Core().compile_model(
        openvino.Model([node, unused], [unused]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    return torch.from_numpy(compiled(torch.zeros(1).numpy())[0].copy())


def types_in_the_runtime(node):
    """Types of the constants in the program that the runtime makes of a product with a matrix."""
    import openvino
    from openvino import opset13

    rows = opset13.parameter([-1, node.get_output_shape(0)[1]], openvino.Type.f32)
    model = openvino.Model([opset13.matmul(rows, node, False, True)], [rows])
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    facts = [one.get_rt_info() for one in compiled.get_runtime_model().get_ops()]
    return {one["outputPrecisions"].astype(str) for one in facts if one["layerType"].astype(str) == "Const"}


def test_int8_rows_are_multiples_of_their_scale():
    rounded = with_weights(target(), "int8")
    for before, after in zip(linear_weights(target()).values(), linear_weights(rounded).values(), strict=True):
        scale = before.abs().amax(dim=1, keepdim=True) / 127
        codes = after / scale
        torch.testing.assert_close(codes, codes.round(), atol=1e-3, rtol=0)
        assert (after - before).abs().le(scale * 0.501).all()
        assert not torch.equal(after, before)


@pytest.mark.parametrize(("dtype", "held"), [("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32")])
def test_numbers_of_16_bits_are_held_in_16_bits(dtype, held):
    pytest.importorskip("openvino")
    matrix = torch.randn(30, 20, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype)).float()
    node = constant(matrix, "same")
    source = node if held == "f32" else node.input_value(0).get_node()
    assert source.get_element_type().get_type_name() == held
    assert torch.equal(evaluated(node), matrix)
    assert held in types_in_the_runtime(node), "the runtime was to keep them so"


@pytest.mark.parametrize("weights", ["same", "bf16"])
def test_constants_own_their_memory(weights):
    pytest.importorskip("openvino")
    matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    nodes = [constant(matrix.clone(), weights) for _ in range(10)]
    # Takes the place of memory that was given back.
    rubbish = [torch.full((300, 200), 7, dtype=torch.int16) for _ in range(50)]
    assert all(torch.equal(evaluated(node), matrix) for node in nodes), len(rubbish)


def test_bf16_is_what_torch_rounds_to():
    rounded = with_weights(target(), "bf16")
    assert torch.equal(rounded.lm_head.weight, target().lm_head.weight.bfloat16().float())
    assert rounded.model.norm.weight is target().model.norm.weight


def test_tied_weights_stay_tied():
    tied = network("llama", "sdpa", tie_word_embeddings=True)
    rounded = with_weights(tied, "int8")
    assert rounded.lm_head.weight is rounded.model.embed_tokens.weight
    assert not torch.equal(rounded.lm_head.weight, tied.lm_head.weight)


def test_a_network_without_linear_maps():
    with pytest.raises(BackendError, match="GPT2LMHeadModel holds .*% of its parameters in linear maps"):
        with_weights(network("gpt2"), "int8")
