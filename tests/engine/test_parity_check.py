"""A backend is accepted if it is about as accurate as the eager network, and refused otherwise."""

import copy

import pytest
import torch

from monge.backends import parity_check
from monge.backends.cpu.compiled import traced_forward
from monge.backends.cpu.rounded_weights import round_weights
from monge.backends.parity_check import check_forward, check_module, difference, forward_spec
from monge.backends.traced import UncompiledForward
from monge.core.errors import BackendError
from monge.networks.forward import FastForward, ForwardOutput, NetworkForward
from monge.networks.network_facts import OutputLayer
from tests.engine.compiling import require
from tests.engine.tiny import network

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def target(dtype=torch.float32):
    return copy.deepcopy(network("llama", "sdpa")).to(dtype)


def trace(model, layers=()):
    eager, spec = NetworkForward(model, layers), forward_spec(model)
    return UncompiledForward(eager, spec, traced_forward(eager, spec))


def noisy(step, size):
    """The step, with an error of this size in every logit and hidden state."""
    run = step.read
    generator = torch.Generator().manual_seed(1)

    class Noisy(FastForward):
        name = "noisy"

        def read(self, *inputs):
            output = run(*inputs)
            logits, *states = (
                one + size * (2 * torch.rand(one.shape, generator=generator).to(one.dtype) - 1)
                for one in (output.logits, *output.states)
            )
            return ForwardOutput(logits=logits, states=tuple(states))

    return Noisy(step, step.spec)


@pytest.mark.parametrize("layers", [(), (0, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_traced_step_is_accepted(dtype, layers):
    model = target(dtype)
    check_forward(model, trace(model, layers), "traced")


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_larger_errors_are_refused(dtype, is_small, monkeypatch):
    monkeypatch.setattr(parity_check, "_is_small", lambda _: is_small)
    model = target(dtype)
    with pytest.raises(BackendError, match="ForCausalLM, noisy, has other logits than the network"):
        check_forward(model, noisy(trace(model), 0.5), "noisy")


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_networks_are_checked_against_themselves(kind, is_small, monkeypatch):
    require("compiled")
    model = round_weights(target(), kind)
    monkeypatch.setattr(parity_check, "_is_small", lambda _: is_small)
    check_forward(model, trace(model), "traced")
    with pytest.raises(BackendError, match="has other logits than the network"):
        check_forward(model, noisy(trace(model), 0.5), "noisy")
    if not is_small and kind == "int8":  # large ones may differ by integers
        check_forward(model, noisy(trace(model), 0.02), "noisy")


def test_the_mask_is_checked():
    class Blind(UncompiledForward):
        def read(self, token_ids, positions, masks, cache):
            return super().read(
                token_ids, positions, [torch.ones_like(mask) for mask in masks], cache
            )

    model = target()
    step = trace(model)
    with pytest.raises(BackendError, match="other logits"):
        check_forward(model, Blind(step, step.spec, step.module), "traced")


@pytest.mark.parametrize("error", [3.9, 4.1])
def test_four_times_the_error_of_the_network_is_rounding(error):
    exact = torch.linspace(-8, 8, 40, dtype=torch.float64).repeat(3, 1)
    eager, ours = exact.clone(), exact.clone()
    eager[1, 7] += 0.05
    ours[2, 9] += 0.05 * error
    found = [ours.bfloat16().float()], [eager.float()]
    reason = difference(*found, lambda: [exact], torch.float32, 1e-3)
    assert (reason is None) is (error < 4)


def test_another_largest_logit_is_refused_where_it_is_clear():
    exact = torch.zeros(1, 3, dtype=torch.float64)
    exact[0, 0] = 0.5
    eager, ours = exact.clone(), exact.clone()
    eager[0, 2] += 0.1
    ours[0, 0] -= 0.3
    ours[0, 1] += 0.3
    reason = difference([ours], [eager], lambda: [exact], torch.float32, 1e-3)
    assert "the largest is another one" in reason
    exact[0, 0] = eager[0, 0] = 0.35  # within four errors of the network: a tie
    ours[0, 0] = 0.05
    assert difference([ours], [eager], lambda: [exact], torch.float32, 1e-3) is None


def test_not_a_number_is_refused():
    nan = torch.full((2, 3), float("nan"), dtype=torch.float64)
    for exact in (lambda: [torch.ones(2, 3, dtype=torch.float64)], lambda: None):
        assert difference([nan], [torch.ones(2, 3)], exact, torch.float32, 1e-3) is not None


def test_modules_with_other_numbers_are_refused():
    layer, like = OutputLayer(target()), (torch.zeros(1, 32),)
    check_module(layer, layer, like, "compiled")
    with pytest.raises(
        BackendError, match="OutputLayer, compiled, gives other numbers: .* float64 "
    ):
        check_module(layer, lambda states: (layer(states)[0] * 1.01,), like, "compiled")
