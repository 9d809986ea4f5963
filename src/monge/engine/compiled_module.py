"""Small modules as machine code, as the compiled backend runs a network's steps."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.export import Dim

from monge.core.errors import BackendError
from monge.core.model import Forward
from monge.engine.apart import apart
from monge.engine.compiled_layout import lay_out
from monge.engine.compiled_program import build_program, load_program
from monge.engine.compiled_store import StoredProgram, find_program, module_key
from monge.engine.module_export import export_module, module_difference
from monge.engine.step import Notify
from monge.engine.step_check import AGREEMENT, refusing

_FORMAT: Final = "compiled module 2"  # raised whenever what is traced, or the files, change


class CompiledModule:
    """A compiled module. One program serves all numbers of rows, and all modules of one architecture.

    Args:
        stored: The program.
        tensors: Weights and buffers by name.
    """

    def __init__(self, stored: StoredProgram, tensors: Mapping[str, Tensor]) -> None:
        self._run = load_program(stored, tensors)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        # The program does not ask for strides.
        return tuple(self._run([tensor.contiguous() for tensor in inputs]))


def compile_module(notify: Notify, module: torch.nn.Module, like: Sequence[Tensor]) -> Forward:
    """A module, compiled, or loaded where that was done before; either way checked against the module itself.

    Args:
        notify: Told what takes long.
        module: See `ModuleHost.hosted`.
        like: Likewise.

    Raises:
        BackendError: If it cannot be compiled here; the message says why.
    """
    name = type(module).__name__
    with refusing(f"{name} cannot be compiled"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's and the compiler's own, about themselves
        program = _load_or_build(_laid_out(module), like, name, notify)
        difference, bound = apart(lambda: module_difference(module, program, like)), AGREEMENT[like[0].dtype]
    if not difference <= bound:
        raise BackendError(f"{name}, compiled, gives other numbers: {difference:.2g} of the largest, not {bound:.2g}")
    return program


def _load_or_build(module: torch.nn.Module, like: Sequence[Tensor], name: str, notify: Notify) -> CompiledModule:
    key = module_key(module, like, _FORMAT)
    stored, damage = find_program(key, ".pt2")
    if damage is not None:
        notify(f"the stored program of {name} cannot be used: {damage}")
    if stored is None:
        notify(f"compiling {name}, once for this machine; it can take a minute")
        stored = _build(module, like, key)
    return CompiledModule(stored, _tensors(module))


def _build(module: torch.nn.Module, like: Sequence[Tensor], key: str) -> StoredProgram:
    inputs = tuple(tensor.new_zeros(3, tensor.shape[1]) for tensor in like)
    program = export_module(module, inputs, tuple({0: Dim.DYNAMIC} for _ in inputs))
    return build_program(program, _tensors(module), key)


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _laid_out(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares its tensors, except that matrices lie in the order in which products of a few rows read them."""
    kept = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    maps = {id(one.weight) for one in module.modules() if isinstance(one, torch.nn.Linear)}
    for tensor in module.parameters():
        if tensor.ndim == 2 and tensor.dtype in {torch.float32, torch.float64} and id(tensor) not in maps:
            kept[id(tensor)] = torch.nn.Parameter(tensor.detach().t().contiguous().t(), requires_grad=False)
    twin = copy.deepcopy(module, dict(kept))
    lay_out(twin)
    return twin
