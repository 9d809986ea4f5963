"""Layers compiled one at a time: the numbers of the network, one program a kind and width, and no weight stored twice."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from monge.backends.fused_layers import LayerCompiler, compile_with_inductor
from monge.backends.parity_check import forward_spec
from monge.backends.traced import TracedForward
from monge.networks.base import NodeBlock
from monge.networks.forward import NetworkForward
from tests.engine import pretend
from tests.engine.compiling import captured_forward, read_by
from tests.engine.tiny import TREE_FAMILIES, network, prompts
from tests.parity.comparing import RandomGrowth

LARGEST_DIFFERENCE = 5e-5
"""Allowed between float32 forwards in another order of summation; as for the eager backend."""


@pytest.fixture(autouse=True)
def unchecked():
    """The type checker of the tests counts calls, and compiled code would depend on the count."""
    jaxtyping.config.update("jaxtyping_disable", True)


@dataclass
class Counting:
    """A `Compile` that counts its programs."""

    backend: str = "eager"
    count: int = 0

    def __call__(self, function: Callable) -> Callable:
        torch._dynamo.reset()

        def compiled(graph, inputs):
            self.count += 1
            return lookup_backend(self.backend)(graph, inputs)

        return torch.compile(function, dynamic=False, fullgraph=True, backend=compiled)


def own(name, attention="sdpa"):
    """A network of a family that this test may change."""
    return copy.deepcopy(network(name, attention))


def read(step, spec, batch, nodes, capacity=64):
    """The logits of a chain, and what is kept of it."""
    ids = torch.arange(batch * nodes).reshape(batch, nodes) % 89 + 3
    columns = torch.arange(nodes).repeat(batch, 1)
    shown = torch.ones(batch, 1, nodes, capacity, dtype=torch.bool).tril()
    hidden = torch.finfo(torch.float32).min
    mask = shown if spec.mask_dtype == torch.bool else torch.where(shown, 0.0, hidden)
    kept = [torch.zeros(batch, heads, capacity, size) for heads, size in spec.cache_shapes]
    places = columns, columns.clone(), torch.arange(nodes)
    with torch.inference_mode():
        logits = step(ids, places, [mask for _ in spec.kinds], kept)[0]
    return logits, kept


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {"llama", "gemma3"} else pytest.mark.slow)
        for name in TREE_FAMILIES
    ],
)
def test_one_program_is_compiled_per_kind_and_width_of_layer(name, attention):
    """Of layers with equal code, whatever the number of layers, rows beyond one, and columns."""
    attention = "eager" if name == "gemma2" else attention  # it has no other here
    target, compile_ = own(name, attention), Counting()
    spec = forward_spec(target)
    fused = TracedForward(NetworkForward(target), spec, LayerCompiler(compile_).adapt)
    plain, kinds = TracedForward(NetworkForward(target), spec), 2 if name == "deepseek_v3" else 1
    shapes = {(1, 1, 64): 1, (1, 1, 128): 1, (1, 4, 64): 2, (2, 4, 64): 3, (4, 4, 128): 3}
    for shape, programs in shapes.items():
        logits, kept = read(fused, spec, *shape)
        expected, expected_kept = read(plain, spec, *shape)
        torch.testing.assert_close(logits, expected, atol=LARGEST_DIFFERENCE, rtol=0)
        for one, other in zip(kept, expected_kept, strict=True):
            torch.testing.assert_close(one, other, atol=LARGEST_DIFFERENCE, rtol=0)
        assert compile_.count == kinds * programs, (name, shape)


@pytest.mark.parametrize(
    ("name", "merged"), [("llama", 2), ("qwen2", 2), ("gpt2", 0), ("deepseek_v3", 2)]
)
def test_no_weight_is_stored_twice(name, merged):
    """Matrices of merged products are views of one, and a second step shares it."""
    target, reference = own(name), network(name, "sdpa")
    before = {key: weight.untyped_storage().nbytes() for key, weight in target.named_parameters()}

    def bytes_held():
        storages = [weight.untyped_storage() for weight in target.parameters()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    total = bytes_held()
    first = TracedForward(
        NetworkForward(target), forward_spec(target), LayerCompiler(Counting()).adapt
    )
    places = [weight.data_ptr() for weight in target.parameters()]
    layer = next(m for m in first.modules() if hasattr(m, "_modules") and vars(m).get("forward"))
    products = {
        vars(one)["forward"].__self__
        for one in layer.modules()
        if one is not layer and "forward" in vars(one)
    }
    assert len(products) == merged
    TracedForward(NetworkForward(target), forward_spec(target), LayerCompiler(Counting()).adapt)
    assert [weight.data_ptr() for weight in target.parameters()] == places
    assert bytes_held() == total == sum(before.values())
    for key, weight in reference.named_parameters():
        assert torch.equal(weight, target.get_parameter(key))


@pytest.mark.slow
def test_compiled_layers_decode_in_captured_graphs():
    """In graphs, behind texts, with trees and batches that are padded, beside hidden states."""
    target, compile_, capture = own("llama"), Counting("aot_eager"), pretend.Rerun()
    step = captured_forward(target, capture, (0, 1, 2), LayerCompiler(compile_))
    assert compile_.count
    given = {"reference": network("llama", "sdpa"), "step": step}
    growth = RandomGrowth(target, prompts((9, 4, 6), seed=1), seed=2, **given)
    assert max(growth.round(compare=True) for _ in range(4)) < LARGEST_DIFFERENCE
    assert growth.non_prefix_commits > 4


@pytest.mark.slow
def test_prepared_shapes_compile_nothing_later():
    target, compile_ = own("llama"), Counting()
    step = captured_forward(target, pretend.Rerun(), (), LayerCompiler(compile_))
    model = read_by(step, target)
    model.prepare(2, 4)
    count = compile_.count
    model.open({0: (5, 6), 1: (7,)})
    for nodes in (1, 2, 3, 4):
        model.extend({row: NodeBlock.chain((5,) * nodes) for row in (0, 1)})
        model.commit({0: (0,), 1: (0,)})
    assert compile_.count == count


class TestFallback:
    def refused(self, target, compiler, match):
        with pytest.warns(UserWarning, match=match) as caught:
            step = captured_forward(target, pretend.Rerun(), (), compiler)
        again = captured_forward(target, pretend.Rerun(), (1,), compiler)  # not said again
        assert len(caught) == 1
        assert step.name == again.name == "cuda_graph"
        given = {"reference": network("llama", "sdpa"), "step": step}
        growth = RandomGrowth(target, prompts((9,)), seed=2, **given)
        assert growth.round(compare=True) < LARGEST_DIFFERENCE

    def test_a_compiler_that_fails(self):
        def broken(function):
            def run(*_):
                raise RuntimeError("no compiler was found")

            return run

        reason = "graphs run them as they are: .*Llama.* be compiled: RuntimeError: no compiler was"
        self.refused(own("llama"), LayerCompiler(broken), reason)

    def test_code_that_cannot_be_compiled(self):
        target = own("llama")
        mlp = target.model.layers[1].mlp
        mlp.register_forward_pre_hook(lambda module, inputs: torch._dynamo.graph_break())
        reason = "LlamaForCausalLM cannot be compiled: Unsup"
        self.refused(target, LayerCompiler(Counting()), reason)

    def test_numbers_that_differ(self):
        def wrong(function):
            return lambda *inputs: function(*inputs) * 1.01

        self.refused(own("llama"), LayerCompiler(wrong), "has other logits than the network")


@pytest.mark.slow
def test_layers_compiled_by_inductor_have_the_logits_of_the_network():
    """By Inductor, on a CPU."""
    target = own("llama")
    step = captured_forward(target, pretend.Rerun(), (), LayerCompiler(compile_with_inductor))
    growth = RandomGrowth(
        target, prompts((9, 4)), seed=2, reference=network("llama", "sdpa"), step=step
    )
    assert max(growth.round(compare=True) for _ in range(3)) < LARGEST_DIFFERENCE
