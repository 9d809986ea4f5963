"""Networks whose weights `device_map` leaves elsewhere: the text of plain `generate`, or an error that names the hooks."""

import copy
from typing import Any

import pytest
import torch

import monge
from monge.core.errors import UnsupportedModelError
from monge.engine.batch import decode
from monge.networks.prefix_cache import PrefixCache
from tests.engine.tiny import network

TEXT = [5, 6, 7, 8, 9, 10]
COUNT = 12
REFUSAL = r"weights of this LlamaForCausalLM are offloaded \(device_map, or hooks of `accelerate`\)"


def offload(module: torch.nn.Module) -> None:
    """Put a hook around a layer as `accelerate` does: its weights have memory only while it runs."""
    layer: Any = module
    weights = dict(layer._parameters)
    forward = layer.forward

    def place(device: str) -> None:
        for name, weight in weights.items():
            moved = None if weight is None else weight.detach().to(device)
            layer._parameters[name] = moved if moved is None else torch.nn.Parameter(moved)

    def run(*inputs: Any, **named: Any) -> Any:
        place("cpu")
        try:
            return forward(*inputs, **named)
        finally:
            place("meta")

    layer._hf_hook, layer._old_forward, layer.forward = object(), forward, run
    place("meta")


def offloaded(*names: str) -> Any:
    """A network; the weights of these parts are elsewhere."""
    model: Any = copy.deepcopy(network("llama"))
    for name in names:
        for module in model.get_submodule(name).modules():
            if module._parameters:
                offload(module)
    return model


def some() -> Any:
    return offloaded("model.layers.0", "model.norm", "lm_head")


def everything() -> Any:
    return offloaded("")


def hooked() -> Any:
    """Hooks that leave the weights where they are."""
    model = copy.deepcopy(network("llama"))
    for module in model.modules():
        if module._parameters:
            vars(module)["_hf_hook"] = object()
            vars(module)["forward"] = module.forward
    return model


def plain() -> list[int]:
    return generated(network("llama"))


def generated(model: Any) -> list[int]:
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None}
    return model.generate(torch.tensor([TEXT]), **options)[0, len(TEXT) :].tolist()


def loaded(target: Any, **options: Any) -> list[int]:
    decoder = monge.load(target, controller="fixed", **options)
    (result,) = decoder.generate([TEXT], max_new_tokens=COUNT, ignore_eos=True)
    return list(result.token_ids)


WAYS = {
    "load": lambda model: loaded(model, backend="eager", drafter="ngram"),
    "draft": lambda model: loaded(network("llama"), draft=model, backend="eager"),
    "both": lambda model: loaded(model, draft=some(), backend="eager"),
    "accelerate": lambda model: generated(monge.accelerate(model)),
    "accelerate a draft": lambda model: generated(
        monge.accelerate(copy.deepcopy(network("llama")), model)
    ),
    "accelerate by programs": lambda model: generated(monge.accelerate(model, backend="compiled")),
}


def test_these_are_networks_of_the_host() -> None:
    assert generated(some()) == generated(everything()) == generated(hooked()) == plain()


@pytest.mark.parametrize("make", [some, hooked])
@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_plain_generate(make: Any, way: str) -> None:
    assert WAYS[way](make()) == plain()


@pytest.mark.parametrize("way", WAYS)
def test_without_an_embedding_in_memory_the_hooks_are_named(way: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSAL):
        WAYS[way](everything())


@pytest.mark.parametrize("backend", ["compiled", "compiled(weights='int8')"])
@pytest.mark.parametrize("make", [some, everything])
def test_programs_are_refused(make: Any, backend: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSAL):
        monge.load(make(), backend=backend, drafter="none")


@pytest.mark.parametrize("names", [("model.layers.0",), ("lm_head",)])
def test_kept_keys_are_those_of_the_text(names: tuple[str, ...]) -> None:
    decoder, prefixes = (
        monge.load(offloaded(*names), drafter="none", backend="eager"),
        PrefixCache(),
    )
    for _ in range(2):
        (session,) = decoder.sessions([TEXT], max_new_tokens=COUNT, ignore_eos=True)
        list(decode([session], decoder.components, max_batch_size=1, prefixes=prefixes))
        assert list(session.completion_ids) == plain()
