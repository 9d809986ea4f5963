"""The compiled backend on a CPU: forwards as machine code, without Python or dispatch between their operations."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.pt2_archive._package import AOTICompiledModel
from transformers import PreTrainedModel

from monge.backends.cpu import grouped_attention, packed_linear
from monge.backends.cpu.code_cache import (
    PROGRAMS,
    StoredCode,
    code_key,
    find_code,
    load_or_make,
    module_facts,
    network_facts,
    store_code,
    writable_folder,
)
from monge.backends.cpu.grouped_attention import load_grouped_attention
from monge.backends.cpu.law_masses import load_law_masses
from monge.backends.cpu.native_library import why_no_compiler
from monge.backends.cpu.packed_linear import (
    follow_weights,
    load_packed_linear,
    merge_products,
    pack_linears,
)
from monge.backends.parity_check import (
    as_backend_error,
    check_forward,
    check_module,
    example_inputs,
    forward_spec,
    why_no_fast_forward,
)
from monge.backends.traced import (
    TracedForward,
    UncompiledForward,
    attend_with,
    export_forward,
    export_module,
    group_shared_heads,
    runs_sdpa,
    tensors_of,
)
from monge.core.errors import BackendError
from monge.networks.adapters import merge_adapters
from monge.networks.attention_masks import chain_visibility, in_numbers
from monge.networks.base import CachedStep, ModuleForward
from monge.networks.forward import (
    MAX_ROWS,
    FastForward,
    Forward,
    ForwardOutput,
    ForwardSpec,
    NetworkForward,
    Run,
)
from monge.networks.network_facts import chooses_logits, packed_layers
from monge.networks.tree_cache import TreeCache
from monge.runtime.notices import notify
from monge.runtime.process import run_in_thread

# With attention that is not our own, more tokens of a prompt or nodes of a row run in the network:
# between products compiled code has one thread.
_PROMPT, _NODES = 384, 64
_ALL: Final = 1 << 40
_START_S, _LAYER_S = 10, 2  # seconds of compiling: a constant, and for each layer of a network
_ATTENTION: Final = "monge_grouped"
_OPTIONS: Final = {
    # Weights are not stored: the code receives them when it is loaded.
    "aot_inductor.package_constants_in_so": False,
    # Nor small ones, which the compiler would write into the code.
    "always_keep_tensor_constants": True,
    # Between two products a step has a few thousand numbers: threads would take longer to start
    # than to work.
    "cpp.threads": 1,
    # Our operations are calls of machine code, past torch's dispatch.
    "aot_inductor.custom_ops_to_c_shims": {
        module.OPERATION: [module.DECLARATION] for module in (packed_linear, grouped_attention)
    },
}


class CompiledForward(FastForward):
    """Compiled code of a network: the same serves all numbers of rows, nodes and columns.

    Args:
        eager: The network.
        spec: Shapes and types of its inputs.
        stored: The compiled code.
        module: The traced module, which holds the weights.
        prompt_tokens: See `FastForward`; 0 if the code gives logits of all nodes.
        max_nodes: See `FastForward`.
    """

    name = "compiled"
    reads_chains = True

    def __init__(
        self,
        eager: NetworkForward,
        spec: ForwardSpec,
        stored: StoredCode,
        module: TracedForward,
        *,
        prompt_tokens: int = 0,
        max_nodes: int = _NODES,
    ) -> None:
        super().__init__(eager, spec)
        self._run, self.module = LoadedCode(stored, tensors_of(module)), module
        self.prompt_tokens, self.max_nodes = prompt_tokens, max_nodes
        self.copied_bytes = sum(layer.panels.nbytes for layer in packed_layers(module))

    def lay_out(self, cache: TreeCache) -> None:
        cache.lay_out(self.spec.cache_shapes, self.spec.dtype)

    def follow(self, network: PreTrainedModel) -> bool:
        self.network = network
        if follows := follow_weights(self.module.network, network):
            self._run.take(tensors_of(self.module))
        return follows

    def read(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput:
        return self._read(token_ids, positions, _first(token_ids.shape[1]), masks, cache)

    def read_prompt(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput:
        return self._read(token_ids, positions, _first(1), masks, cache)

    def read_chain(self, token_ids: Sequence[int], start: int, cache: TreeCache) -> ForwardOutput:
        positions = torch.arange(start, start + len(token_ids))[None]
        seen = chain_visibility(len(token_ids), start)[None].contiguous()
        mask = in_numbers(seen, self.spec.mask_dtype)
        masks = [mask] * len(self.spec.kinds)
        ids, shown = torch.tensor([token_ids]), _first(len(token_ids))
        return self._output([ids, positions, positions, shown, *masks, *cache.kept()])

    def _read(
        self,
        token_ids: Tensor,
        positions: Tensor,
        shown: Tensor,
        masks: Sequence[Tensor],
        cache: TreeCache,
    ) -> ForwardOutput:
        # Compiled code ignores strides, and masks of chains are views of a wider mask.
        dense = (mask.contiguous() for mask in masks)
        return self._output(
            [token_ids, positions, cache.columns(token_ids.shape[1]), shown, *dense, *cache.kept()]
        )

    def _output(self, inputs: list[Tensor]) -> ForwardOutput:
        logits, *states = self._run(inputs)
        return ForwardOutput(logits=logits, states=tuple(states))


@cache
def _first(count: int) -> Tensor:
    """Indices of the first nodes."""
    return torch.arange(count)


def _pending(
    run: Run,
    name: str,
    key: str,
    compile_s: int,
    *,
    make: Callable[[], StoredCode],
    load: Callable[[StoredCode], Run],
) -> Forward[Run]:
    """Return a forward that is compiled, or loaded from the cache, when it is needed.

    Args:
        run: What runs until then.
        name: Class of the network or module, for messages.
        key: Its name in the cache.
        compile_s: Seconds that compiling takes.
        make: Compiles and stores it.
        load: Loads it and checks it against the network or module.
    """
    place = (key, ".pt2", name)

    def load_or_compile() -> Run:
        with as_backend_error(f"{name} cannot be compiled"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer and the compiler warn about themselves
            return load_or_make(place, make, load, f"{name} ({compile_s} s)")

    return Forward(run, load_or_compile, lambda: 0 if find_code(*place) else compile_s)


def pending_forward(eager: NetworkForward) -> Forward[NetworkForward]:
    """Return a network's forward, to be compiled; it is checked against the network.

    Args:
        eager: A network in evaluation mode.

    Raises:
        BackendError: If it is known before trying that the network cannot be compiled here.
    """
    network = eager.network
    if (reason := why_no_compiled_forward(network)) is not None:
        raise BackendError(reason)
    name = type(network).__name__
    with as_backend_error(f"{name} cannot be compiled"):
        spec = forward_spec(network)
        key = code_key(network, *network_facts(network), spec, eager.layers)
    step = cache(partial(traced_forward, eager, spec))
    is_own = attends_in_machine_code(network)
    limits = {
        "prompt_tokens": (_ALL if is_own else _PROMPT) if chooses_logits(network) else 0,
        "max_nodes": _ALL if is_own else _NODES,
    }

    def make() -> StoredCode:
        # A wrong trace is refused before it is compiled for minutes.
        traced = UncompiledForward(eager, spec, step())
        run_in_thread(lambda: check_forward(network, traced, "traced"))
        return compile_exported(export_forward(step(), spec), tensors_of(step()), key)

    def load(stored: StoredCode) -> NetworkForward:
        if network.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
            notify(
                f"this processor has no bfloat16 instructions: {name} is several times "
                "faster with dtype='float32'"
            )
        compiled = CompiledForward(eager, spec, stored, step(), **limits)
        run_in_thread(lambda: check_forward(network, compiled, "compiled"))
        return compiled

    compile_s = _START_S + _LAYER_S * len(spec.cache_shapes) // 2
    return _pending(eager, name, key, compile_s, make=make, load=load)


def why_no_compiled_forward(network: PreTrainedModel) -> str | None:
    """Return the reason why a network cannot be compiled, if that is known before trying."""
    if (reason := why_no_fast_forward(network, "compiled", merges=True)) is not None:
        return reason
    if network.device.type != "cpu":
        return f"{type(network).__name__} is on {network.device}, and steps are compiled for the CPU only"
    return why_no_compiler()


def traced_forward(eager: NetworkForward, spec: ForwardSpec) -> TracedForward:
    """Trace a network on the CPU.

    Weights of float32 layers are stored in tiles and those of float64 layers transposed, tied
    weights too, so that a product with a few rows streams through them.
    """
    return TracedForward(eager, spec, _adapt)


def _adapt(network: PreTrainedModel) -> None:
    # Read before layers are packed: a network's type is that of its first weight.
    is_own = attends_in_machine_code(network)
    merge_adapters(network)
    pack_linears(network)
    if is_own:
        attend_with(network, _ATTENTION, grouped_attention.OPERATION)
    else:
        group_shared_heads(network)


def attends_in_machine_code(network: PreTrainedModel) -> bool:
    """Return whether logits of a node depend on its text alone, to the last bit, by `cpu.grouped_attention`."""
    return runs_sdpa(network) and network.dtype == torch.float32


def pending_module(module: torch.nn.Module, like: Sequence[Tensor]) -> Forward[ModuleForward]:
    """Return a module's forward, to be compiled; see `FeatureModel.module_forward`.

    The code serves all batch sizes and all weights. It is checked against the module.

    Args:
        module: The module.
        like: Inputs of the widths and types that will come.

    Raises:
        BackendError: If the module cannot be compiled; the message gives the reason.
    """
    name = type(module).__name__
    with as_backend_error(f"{name} cannot be compiled"):
        packed = _packed(module, is_float32=like[0].dtype == torch.float32)
        inputs = [(str(tensor.dtype), tensor.shape[1]) for tensor in like]
        key = code_key(packed, module_facts(packed), inputs)

    def load(stored: StoredCode) -> ModuleForward:
        compiled = CompiledModule(stored, packed, module)
        run_in_thread(lambda: check_module(module, compiled, like, "compiled"))
        return compiled

    def make() -> StoredCode:
        return _compile_module(packed, like, key)

    return _pending(module, name, key, _START_S, make=make, load=load)


class CompiledModule:
    """The compiled code of a module, whose weights it has in a packed copy; the module reads many rows."""

    def __init__(
        self, stored: StoredCode, packed: torch.nn.Module, module: torch.nn.Module
    ) -> None:
        self._run = LoadedCode(stored, tensors_of(packed))
        self._packed, self._module = packed, module
        self._num_rows = Tensor.numel if isinstance(module, CachedStep) else Tensor.__len__

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        if self._num_rows(inputs[0]) > MAX_ROWS:
            return self._module(*inputs)
        return tuple(self._run([tensor.contiguous() for tensor in _tensors(inputs)]))

    def follow(self) -> None:
        """Take the weights that the module has now.

        If its layers were replaced, the old weights stay: they only draft, so texts stay exact.
        """
        if follow_weights(self._packed, self._module):
            self._run.take(tensors_of(self._packed))


def _tensors(inputs: Sequence[Any]) -> Iterator[Tensor]:
    # `tree_leaves` takes as long as a small step.
    for value in inputs:
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)


def _compile_module(module: torch.nn.Module, like: Sequence[Tensor], key: str) -> StoredCode:
    example = example_inputs(module, like)[0]
    if isinstance(module, CachedStep):
        both, rows = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}
        shapes: tuple[Any, ...] = (
            both,
            both,
            (both, both, rows),
            [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC} for _ in example[-2]],
            [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in example[-1]],
        )
    else:
        example = tuple(tensor.new_zeros(3, tensor.shape[1]) for tensor in like)
        shapes = tuple({0: Dim.DYNAMIC} for _ in example)
    return compile_exported(export_module(module, example, shapes), tensors_of(module), key)


def _packed(module: torch.nn.Module, *, is_float32: bool) -> torch.nn.Module:
    """A copy that shares its tensors, except for matrices, which lie in the order that products of a few rows read."""
    kept = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    known = torch.nn.Linear | torch.nn.Embedding
    layers = {id(layer.weight) for layer in module.modules() if isinstance(layer, known)}
    for tensor in module.parameters():
        is_float = tensor.dtype in {torch.float32, torch.float64}
        if tensor.ndim == 2 and is_float and id(tensor) not in layers:
            kept[id(tensor)] = torch.nn.Parameter(
                tensor.detach().t().contiguous().t(), requires_grad=False
            )
    twin = copy.deepcopy(module, dict(kept))
    pack_linears(twin)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if getattr(child, "is_cache_attention", False) and is_float32:
                parent.add_module(name, _CacheAttention())
    return twin


class _CacheAttention(torch.nn.Module):
    """Attention whose result for a node depends on its own text alone."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scale = queries.shape[-1] ** -0.5
        return grouped_attention.OPERATION(queries, keys, values, mask, scale)


def compile_exported(
    exported: ExportedProgram, tensors: Mapping[str, Tensor], key: str
) -> StoredCode:
    """Compile and store a traced module.

    Args:
        exported: The traced module.
        tensors: Its weights and buffers by name, which are not stored.
        key: Its name in the cache.
    """
    merge_products(exported.graph)
    with tempfile.TemporaryDirectory(dir=writable_folder(PROGRAMS)) as scratch:
        package = Path(scratch) / "code.pt2"
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package), inductor_configs=_OPTIONS
        )
        constants = {
            name: constant
            for name, constant in exported.constants.items()
            if name not in tensors and isinstance(constant, Tensor)
        }
        return store_code(key, package, constants)


class LoadedCode:
    """Compiled code with weights and buffers, which it keeps alive; its inputs must be contiguous.

    It runs once at a time. A second thread must not wait for it inside, with the interpreter's
    lock held, which `released_lock.h` takes again.
    """

    def __init__(self, stored: StoredCode, tensors: Mapping[str, Tensor]) -> None:
        for load_operation in (load_packed_linear, load_grouped_attention, load_law_masses):
            load_operation()
        # As `aoti_load_package` does, without asking the compiler for a second what this machine is,
        # which is part of the key.
        aoti: Any = vars(torch._C)["_aoti"]
        self._loader = aoti.AOTIModelPackageLoader(str(stored.path), "model", False, 1, -1)
        self._made, self._lock = stored.constants, Lock()
        self.take(tensors)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Read these weights and buffers from now on, where they lie."""
        code, known = AOTICompiledModel(self._loader), {**tensors, **self._made}
        constants = {name: known[name].detach() for name in code.get_constant_fqns()}
        with self._lock:
            code.load_constants(constants, check_full_update=True, user_managed=True)
            self._memory = constants  # the code points to it

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run it: its inputs, flattened, to its outputs."""
        with self._lock:
            return self._loader.run(inputs)
