"""Compile the layers of a network separately: layers of a kind share a compiled function for each width.

A layer takes a second to compile and a whole network minutes; between layers nothing is left to fuse.
"""

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from monge.backends.traced import CacheLayer, attend_by_products
from monge.core.errors import UnsupportedModelError

_MOST_VARIANTS: Final = 1024
"""Compiled variants that torch keeps of a function: kinds of layers by shapes, of all networks."""
_LEAST_CAPABILITY: Final = (7, 0)  # of a card for which Triton compiles
_torch: Any = torch

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a function at its first call with tensors of a shape, as `torch.compile` does."""


def compile_with_inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function whole, for fixed sizes except those that are marked; a `Compile`."""
    return torch.compile(function, dynamic=False, fullgraph=True)


class LayerCompiler:
    """Compiles the layers of networks, until that fails.

    Args:
        compile: Compiles a function.
        why_no_compiling: The reason why layers are not compiled; `None` if they are.
    """

    def __init__(
        self, compile: Compile = compile_with_inductor, why_no_compiling: str | None = None
    ) -> None:
        self._compile, self.why_no_compiling = compile, why_no_compiling

    def stop_compiling(self, reason: object) -> None:
        """Compile no more layers, and warn why."""
        self.why_no_compiling = str(reason)
        warnings.warn(
            f"layers are not compiled, CUDA graphs run them as they are: {reason}", stacklevel=4
        )

    def adapt(self, network: PreTrainedModel) -> None:
        """Make the layers of a network run compiled; see `TracedForward`.

        Linear layers that read the same rows become a single product. Their matrices become views
        of a joint matrix.

        Raises:
            UnsupportedModelError: If the layers of the network cannot be distinguished.
        """
        path = _path_of_layers(network)
        layers: list[Any] = list(network.get_submodule(path).children())
        _merge_products(network, layers)
        attend_by_products(network)
        run = self._compile(_run)
        for place, layer in enumerate(layers):
            for module in layer.modules():
                # Otherwise each number would be compiled by itself.
                if isinstance(getattr(module, "layer_idx", None), int):
                    module.layer_idx = 0
                if module is not layer:
                    _drop_recorders(module)
            layer.forward = _CompiledLayer(layer, place, run)


def compiler_for(device: torch.device) -> LayerCompiler | None:
    """Return the compiler of layers on a device, or `None` if there is none for its kind."""
    if device.type != "cuda":
        return None
    compiler = LayerCompiler()
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        compiler.stop_compiling(
            f"the card has compute capability {capability[0]}.{capability[1]}, and Triton needs "
            f"{_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]}"
        )
    elif find_spec("triton") is None:
        compiler.stop_compiling("the package triton is not installed")
    return compiler


class _CompiledLayer:
    """The forward of a layer, by the compiled function of all layers of its kind."""

    def __init__(self, layer: torch.nn.Module, place: int, run: Callable[..., Any]) -> None:
        self._layer, self._place, self._run = layer, place, run

    def __call__(self, states: Tensor, *inputs: Any, **named: Any) -> Any:
        given = [self._own(value) for value in (states, *inputs)]
        named = {name: self._own(value) for name, value in named.items()}
        for value in (*given, *named.values()):
            _mark_sizes(value, len(states))
        settings = _torch._dynamo.config.patch(
            recompile_limit=_MOST_VARIANTS,
            accumulated_recompile_limit=_MOST_VARIANTS,
            skip_nnmodule_hook_guards=False,  # a hook on one layer makes it a kind of its own
        )
        with settings, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns about itself
            return self._run(self._layer, given, named)

    def _own(self, value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        layer = value.layers[self._place]
        assert isinstance(layer, CacheLayer)
        return layer.alone()


def _run(layer: torch.nn.Module, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
    return type(layer).forward(layer, *inputs, **named)


def _mark_sizes(value: Any, batch: int) -> None:
    """Let a compiled function serve all capacities of the cache, and all batches of more than one row."""
    if isinstance(value, Cache):
        (layer,) = value.layers
        assert isinstance(layer, CacheLayer)
        for tensor in (layer.keys, layer.values):
            assert tensor is not None
            _torch._dynamo.maybe_mark_dynamic(tensor, 2)
        _mark_sizes([layer.keys, layer.values, layer.rows, layer.columns], batch)
    elif isinstance(value, list | tuple):
        for entry in value:
            _mark_sizes(entry, batch)
    elif isinstance(value, Tensor):
        if value.ndim == 4 and value.shape[1] == 1:  # a mask
            _torch._dynamo.maybe_mark_dynamic(value, 3)
        if value.ndim and value.shape[0] == batch > 1:
            _torch._dynamo.maybe_mark_dynamic(value, 0)


def _drop_recorders(module: torch.nn.Module) -> None:
    """Drop transformers' hooks for attention weights, since hooks cannot be compiled."""
    for key, hook in list(module._forward_hooks.items()):
        if str(getattr(hook, "__module__", "")).startswith("transformers."):
            del module._forward_hooks[key]


class _Product:
    """A joint product of linear layers that read the same rows, in the order of their calls."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._weight = _joined([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _joined(biases) if biases else None
        self._widths = [layer.out_features for layer in layers]
        self._parts = list[Tensor]()

    def first(self, rows: Tensor) -> Tensor:
        """Multiply for all layers; return what the first gives."""
        parts = torch.nn.functional.linear(rows, self._weight, self._bias)
        first, *rest = parts.split(self._widths, dim=-1)
        # A list, not a slice of what `*` gives: torch 2.11 compiles that as a tuple.
        self._parts = list(rest)[::-1]
        return first

    def later(self, rows: Tensor) -> Tensor:
        """Return what the next layer gives."""
        return self._parts.pop()


def _merge_products(network: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> None:
    """Merge linear layers of a module that read the same rows, such as queries, keys and values.

    A forward of a single token shows which layers do.
    """
    read = dict[tuple[int, int], tuple[object, list[Linear]]]()
    hooks: list[Any] = []
    for parent in (module for layer in layers for module in layer.modules()):
        for child in parent.children():
            if _can_merge(child):
                hooks.append(child.register_forward_pre_hook(_noter(read, id(parent))))
    try:
        token = torch.zeros(1, 1, dtype=torch.int64, device=network.device)
        # With states, so that the host installs its recorders now.
        with torch.inference_mode():
            network(input_ids=token, use_cache=False, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    for _, linears in read.values():
        is_once = len({id(linear) for linear in linears}) == len(linears) > 1
        if is_once and len({(linear.weight.dtype, linear.bias is None) for linear in linears}) == 1:
            product = _Product(linears)
            for place, linear in enumerate(linears):
                layer: Any = linear
                layer.forward = product.later if place else product.first


def _noter(read: dict[Any, Any], parent: int) -> Callable[..., None]:
    # The rows are kept, so that no other tensor gets their id.
    return lambda layer, inputs: read.setdefault((parent, id(inputs[0])), (inputs[0], []))[
        1
    ].append(layer)


def _can_merge(module: torch.nn.Module) -> bool:
    return (
        type(module) is Linear
        and module.weight.is_floating_point()
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Join weights in a tensor, and make the weights views of it."""
    rows = [len(weight) for weight in weights]
    with torch.inference_mode(mode=False), torch.no_grad():
        first = weights[0].detach()
        memory = {weight.untyped_storage().data_ptr() for weight in weights}
        ends = accumulate((weight.nbytes for weight in weights), initial=first.data_ptr())
        starts = zip(weights, ends, strict=False)
        if len(memory) == 1 and all(
            weight.is_contiguous() and weight.data_ptr() == start for weight, start in starts
        ):
            return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
        whole = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, whole.split(rows), strict=True):
            weight.data = part
    return whole


def _path_of_layers(network: PreTrainedModel) -> str:
    """Return the name of the list of a network's layers.

    Raises:
        UnsupportedModelError: If there is no such list, or several.
    """
    total = int(network.config.get_text_config().num_hidden_layers)
    paths = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == total
        and all(map(_has_number, module))
    ]
    if len(paths) != 1:
        raise UnsupportedModelError(
            f"{type(network).__name__}: one list of {total} numbered layers was expected; found "
            f"{len(paths)}, so layers cannot be told apart"
        )
    return paths[0]


def _has_number(module: torch.nn.Module) -> bool:
    return any(isinstance(getattr(child, "layer_idx", None), int) for child in module.modules())
