"""Small modules beside a network, run by its backend: its output layer, and the steps of a head."""

import warnings
from collections.abc import Callable, Sequence
from typing import Final
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.core.model import Forward
from monge.engine.models.forward_program import PendingHost, PendingProgram, make_programs
from monge.engine.models.network_facts import OutputLayer

ModuleMaker = Callable[[torch.nn.Module, Sequence[Tensor]], Forward | PendingProgram[Forward]]
"""Makes a program of a module, or one that is pending, for inputs of these widths and types.

Raises `BackendError` where there is none.
"""

# As of a step: with more rows arithmetic counts, and the module itself does as well.
_ROWS: Final = 64


class ModuleRunner:
    """Runs modules by a backend, where there is one.

    Args:
        network: The network beside which they run.
        maker: The backend's; `None` runs every module as it is.
        host: The model whose pending programs are made when a module first runs.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        maker: ModuleMaker | None,
        host: PendingHost | None = None,
    ) -> None:
        self._network, self._maker = network, maker
        # Weak, because the host owns this runner: a cycle would keep networks in memory for longer.
        self._host = ref(self if host is None else host)
        self._output: Forward | None = None
        self._later: list[_LaterProgram] = []

    def run(self, module: torch.nn.Module, like: Sequence[Tensor]) -> Forward:
        """See `ModuleHost.module_program`."""
        if self._maker is None:
            return module
        try:
            program = self._maker(module, like)
        except BackendError as error:
            return _eagerly(module, error)
        if not isinstance(program, PendingProgram):
            return _for_few_rows(program, module)
        self._later.append(_LaterProgram(program, module, self._host))
        return self._later[-1]

    def pending(self) -> Sequence[PendingProgram[Forward]]:
        """See `PendingHost`."""
        return [one.program for one in self._later]

    def make_programs(self) -> None:
        """See `PendingHost`."""
        while self._later:
            self._later[0].make()
            self._later.pop(0)  # one that was interrupted is made by the next call

    def logits(self, states: Tensor) -> Tensor:
        """The network's logits of last hidden states."""
        if self._output is None:
            self._output = self.run(OutputLayer(self._network), (states[:1],))
        return self._output(states)[0]


class _LaterProgram:
    """A module whose program is made at its first call, together with the others of its host."""

    def __init__(
        self, program: PendingProgram[Forward], module: torch.nn.Module, host: ref[PendingHost]
    ) -> None:
        self.program, self._module, self._host = program, module, host
        self._run: Forward = self._first

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._run(*inputs)

    def make(self) -> None:
        try:
            self._run = _for_few_rows(self.program.make(), self._module)
        except BackendError as error:
            self._run = _eagerly(self._module, error)

    def _first(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        host = self._host()
        assert host is not None, "the host runs the modules"
        make_programs((host,))
        return self._run(*inputs)


def _for_few_rows(program: Forward, module: torch.nn.Module) -> Forward:
    return lambda *inputs: (program if len(inputs[0]) <= _ROWS else module)(*inputs)


def _eagerly(module: torch.nn.Module, error: BackendError) -> Forward:
    warnings.warn(f"part of a head runs eagerly: {error}", stacklevel=5)
    return module
